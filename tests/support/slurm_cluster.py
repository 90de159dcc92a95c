"""A real SLURM cluster of throw-away nodes on one machine: munged, slurmctld, one slurmd and one sshd a node.

Every host lives in its own network, pid, mount and uts namespace with its own address, so it can lose its power or its
link; each node pretends to have two GPUs. The file system is the machine's: every folder is a shared folder. Needs
root, the packages named in `BINARIES`, and the right to make namespaces; `why_not()` says what is missing. Nothing
outside the folder and the namespaces made here is touched.
"""

import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

from support.runs import wait_for

BINARIES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
HEAD = "10.77.0.1"

# pid 1 of a host: reaps, and its death takes every process of the host with it. The machine's resolver is not
# reachable from here; without `hosts: files` every connection of torch's store loses ten seconds to reverse look-ups.
INIT = """\
#!/bin/bash
name=$1 address=$2 D={folder}
mount --make-rprivate / && mount -t proc proc /proc && hostname "$name"
mount --bind "$D/hosts" /etc/hosts
mount --bind "$D/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$D/ssh/config" /etc/ssh/ssh_config
export SLURM_CONF=$D/slurm.conf
if [ "$name" = head ]; then
  slurmctld -D &
else
  mkdir -p "$D/spool/$name"
  slurmd -D -N "$name" &
  mkdir -p /run/sshd
  /usr/sbin/sshd -D -e -f "$D/ssh/sshd_config" -o ListenAddress="$address" &
fi
trap 'exit 0' TERM
while :; do sleep 3600 & wait $!; done
"""

CONF = """\
ClusterName=cqwen
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmctldParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
MinJobAge=3600
SlurmdTimeout=12
InactiveLimit=0
MessageTimeout=10
UnkillableStepTimeout=30
"""

SSHD = """\
HostKey {folder}/ssh/hostkey
AuthorizedKeysFile {folder}/ssh/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
MaxStartups 100
"""

SSH = """\
Host *
  User root
  IdentityFile {folder}/ssh/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_not() -> str | None:
    """The reason why a cluster cannot be brought up here; None where it can."""
    missing = [package for name, package in BINARIES.items() if shutil.which(name, path=SBIN) is None]
    if missing:
        return f"not installed: {' '.join(dict.fromkeys(missing))}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    probe = ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "mount", "--make-rprivate", "/"]
    made = subprocess.run(probe, capture_output=True, text=True)
    if made.returncode:
        return f"may not make namespaces: {made.stderr.strip()}"
    bridge = ["unshare", "--net", "ip", "link", "add", "br0", "type", "bridge"]
    made = subprocess.run(bridge, capture_output=True, text=True)
    return f"may not make a bridge: {made.stderr.strip()}" if made.returncode else None


class Cluster:
    """`nodes` hosts named node1, node2, ... and a head; partitions `main`, and `high`, which preempts it."""

    def __init__(self, nodes: int, cpus: int = 2, gpus: int = 2, grace_s: int = 20) -> None:
        self.size, self.cpus, self.gpus, self.grace_s = nodes, cpus, gpus, grace_s
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # munge wants a way in for everybody
        self.prefix = f"cq{os.getpid()}-{secrets.token_hex(2)}"
        self.inits: dict[str, int] = {}
        self.outers: dict[str, subprocess.Popen[bytes]] = {}

    # ------------------------------------------------------------------------------------ up and down

    def up(self) -> None:
        self._write_files()
        munge = self.folder / "munge"
        options = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        command = [
            "/usr/sbin/munged",
            "--foreground",
            *(f"--{option}={munge / name}" for option, name in options.items()),
        ]
        self.outers["munged"] = self._child(command, "munged.log")
        wait_for("munged's socket", lambda: (munge / "sock").exists(), 20, every=0.01)
        for name in self._hosts():
            self._do("ip", "netns", "add", self._namespace(name))
            self._link(name, "link", "set", "lo", "up")
        self._link("head", "link", "add", "br0", "type", "bridge")
        self._link("head", "addr", "add", f"{HEAD}/24", "dev", "br0")
        self._link("head", "link", "set", "br0", "up")
        for name in self._hosts()[1:]:
            end = f"v-{name}"
            self._link(
                "head", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", self._namespace(name)
            )
            self._link("head", "link", "set", end, "master", "br0", "up")
            self._link(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._link(name, "link", "set", "eth0", "up")
            self._link(name, "route", "add", "default", "via", HEAD)
        for name in self._hosts():
            self.start(name)
        self.wait_idle()

    def down(self) -> None:
        for process in self.outers.values():
            process.kill()
            process.wait()
        for name in self._hosts():
            subprocess.run(["ip", "netns", "del", self._namespace(name)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Until every node waits for work."""
        wanted = f"{self.size} idle"
        wait_for(
            f"{wanted} (sinfo: {self.slurm('sinfo', check=False)})",
            lambda: self.slurm("sinfo", "-h", "-p", "main", "-o", "%D %T", check=False).strip() == wanted,
            timeout,
        )

    def mend(self) -> None:
        """Every host on, every link in, every node idle."""
        for name in self._hosts()[1:]:
            self.heal(name)
            if self.outers[name].poll() is not None:
                self.start(name)
        self.wait_idle()

    # ------------------------------------------------------------------------------------------ hosts

    def address(self, name: str) -> str:
        return HEAD if name == "head" else f"10.77.0.{10 + int(name[4:])}"

    def start(self, name: str) -> None:
        """Power on."""
        command = ["nsenter", f"--net=/run/netns/{self._namespace(name)}"]
        command += ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount", "--uts"]
        command += ["bash", str(self.folder / "init"), name, self.address(name)]
        self.outers[name] = self._child(command, f"{name}.init.log")
        children = Path(f"/proc/{self.outers[name].pid}/task/{self.outers[name].pid}/children")
        wait_for(f"the first process of {name}", lambda: children.read_text().split(), every=0.01)
        self.inits[name] = int(children.read_text().split()[0])
        wait_for(f"{name}'s own name", lambda: self.run_on(name, "hostname").stdout.strip() == name, every=0.02)

    def kill(self, name: str) -> None:
        """Power off: every process of the host is gone."""
        os.kill(self.inits[name], signal.SIGKILL)
        self.outers[name].wait()

    def cut(self, name: str) -> None:
        """The network cable out."""
        self._link("head", "link", "set", f"v-{name}", "down")

    def heal(self, name: str) -> None:
        self._link("head", "link", "set", f"v-{name}", "up")

    def on(self, name: str, *command: object, cwd: Path | None = None) -> list[str]:
        """The command line that runs `command` on a host, in `cwd` or the current folder."""
        enter = ["nsenter", "-t", str(self.inits[name]), "--net", "--pid", "--mount", "--uts"]
        return [*enter, f"--wd={cwd or os.getcwd()}", "--", *map(str, command)]

    def run_on(
        self, name: str, *command: object, timeout: float = 200.0, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        line = self.on(name, *command, cwd=cwd)
        return subprocess.run(
            line, capture_output=True, text=True, timeout=timeout, env=self.environment(**environment)
        )

    def environment(self, **more: str) -> dict[str, str]:
        """What a person at the head has: nothing of a launcher around the tests."""
        dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("SLURM_")}
        plain = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return {**kept, **plain, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    # ------------------------------------------------------------------------------------------- jobs

    def slurm(self, *command: object, check: bool = True, cwd: Path | None = None) -> str:
        """The output of a SLURM command, given at the head."""
        done = self.run_on("head", *command, cwd=cwd)
        assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}: {done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by key; a busy machine may need several tries to ask."""
        for last in (False, False, False, True):
            said = self.slurm("scontrol", "show", "job", "-o", job, check=last)
            if said:
                break
            time.sleep(2)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait_end(self, job: str, timeout: float = 300.0) -> dict[str, str]:
        """Until the job is over, requeues included; polls, since `sbatch --wait` backs off."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}
        wait_for(f"the end of job {job}", lambda: self.job(job)["JobState"] in over, timeout, every=0.3)
        return self.job(job)

    # ------------------------------------------------------------------------------------ small parts

    def _child(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """A process that ends with this one, however this one ends; and hosts end with it."""
        with (self.folder / "log" / log).open("ab") as file:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def _hosts(self) -> list[str]:
        return ["head", *(f"node{i + 1}" for i in range(self.size))]

    def _namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _link(self, name: str, *words: str) -> None:
        self._do("ip", "-n", self._namespace(name), *words)

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": SBIN})
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def _write_files(self) -> None:
        D = self.folder
        for name in ("munge", "state", "log", "ssh", "spool"):
            (D / name).mkdir(parents=True)
        D.chmod(0o755)
        (D / "munge").chmod(0o711)
        (D / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (D / "munge" / "key").chmod(0o600)
        (D / "init").write_text(INIT.format(folder=D))
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self._hosts())
        (D / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        switch = Path("/etc/nsswitch.conf")
        rest = [line for line in switch.read_text().splitlines() if not line.startswith("hosts:")]
        (D / "nsswitch.conf").write_text("\n".join([*rest, "hosts: files"]) + "\n")
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.address(name)} CPUs={self.cpus} RealMemory=20000 "
            f"Gres=gpu:{self.gpus} State=UNKNOWN"
            for name in self._hosts()[1:]
        ]
        for index in range(self.gpus):  # pretended: SLURM gives them out, and nobody opens them
            os.mknod(D / f"gpu{index}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (D / "gres.conf").write_text(f"NodeName=node[1-{self.size}] Name=gpu File={D}/gpu[0-{self.gpus - 1}]\n")
        partitions = [
            f"PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime={self.grace_s}",
            "PartitionName=high Nodes=ALL Default=NO MaxTime=60 PriorityTier=10 PreemptMode=OFF",
        ]
        conf = CONF.format(folder=D, head=HEAD)
        (D / "slurm.conf").write_text("\n".join([conf.rstrip(), *nodes, *partitions]) + "\n")
        for key in ("id", "hostkey"):
            self._do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(D / "ssh" / key))
        (D / "ssh" / "sshd_config").write_text(textwrap.dedent(SSHD).format(folder=D))
        (D / "ssh" / "config").write_text(textwrap.dedent(SSH).format(folder=D))
