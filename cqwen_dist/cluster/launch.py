"""Starts a run's ranks with the `deepspeed` launcher, after all checks that are possible without ranks.

Ranks on multiple hosts: pdsh over ssh, one hostfile line per host. pdsh passes its arguments to a shell on each host,
and no environment. So none of these arguments comes from the user: the ranks' order is one encoded word
(`cluster.rank`), and their environment is a file in the run folder that only its owner can read. A stop request goes
directly to the ranks, found by command line, never to their launcher: killing pdsh would break the pipe that ranks
write to while they save.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from cqwen_dist.cluster.rank import MODULE, Order, rank_environment, ranks_of_a_node
from cqwen_dist.config import Config, Said, UserError, as_list, source_files, writing
from cqwen_dist.config.one_job import load_configs
from cqwen_dist.parallel.launcher import LAUNCHER, free_port, taken
from cqwen_dist.run.files import STACKS, read_small
from cqwen_dist.run.folder import is_done, refuse_changes
from cqwen_dist.run.status import Status, read_status

# Environment variables that the ranks get: these names, names with these prefixes, and proxies.
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
PREFIXES = (
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_", "UCX_", "DS_", "CQWEN_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_"),
)
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")  # also in capitals
# A value is in quotes, or ends before a comment. A token may contain # and quotes.
_VARIABLE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*)(?P=quote)|(?P<plain>[^"'\s].*?)?)(?:\s+\#.*|\s*)""",
    re.ASCII,
)
# DeepSpeed would pass these to the remote shell, with quoting that is not ours.
_NOT_FOR_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "DS_ENV_FILE")
STOPPED = 75  # exit code after an orderly stop: the run can resume
GRACE_S = 10.0  # seconds between SIGTERM and SIGKILL


def read_hostfile(path: Path) -> dict[str, int]:
    """Number of ranks by host, from lines `host slots=N`; # starts a comment. Raises `UserError` with the line."""
    hosts: dict[str, int] = {}
    for where, line in _lines(path, "--hostfile"):
        words = line.partition("#")[0].split()
        found = re.fullmatch(r"([\w][\w.@-]*) slots=([1-9]\d*)", " ".join(words), re.ASCII)
        if found is None:
            raise UserError("--hostfile", line, "host slots=N", where)
        if found[1] in hosts:
            raise UserError("--hostfile", Said(f"this host is listed twice: {line}"), "", where)
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise UserError("--hostfile", str(path), "at least one line: host slots=N")
    return hosts


def read_environment() -> dict[str, str]:
    """The ranks' environment: this process's variables to pass on, then the NAME=VALUE lines of DeepSpeed's
    `.deepspeed_env` in this folder or the home folder, if there is one.

    `export`, quotes around a value and a comment after it are left out. Names such as $HOME stay. Raises `UserError`.
    """
    environment = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(PREFIXES)}
    environment |= {k: v for k, v in os.environ.items() if k.lower() in PROXIES}
    usual = (Path(".deepspeed_env"), Path.home() / ".deepspeed_env")
    path = next((file for file in usual if file.is_file()), None)
    for where, line in [] if path is None else _lines(path, ".deepspeed_env"):
        if (found := _VARIABLE.fullmatch(line)) is None:
            raise UserError(".deepspeed_env", line, "NAME=VALUE, the value with two quotes around it or none", where)
        environment[found["name"]] = found["quoted"] or found["plain"] or ""
    return environment


def _lines(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """(place, text) for each line except empty lines and comments. Raises `UserError`."""
    try:
        lines = read_small(path).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(option, str(path), f"a readable file ({getattr(error, 'strerror', error)})") from None
    numbered = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1))
    return ((where, line) for where, line in numbered if line.strip() and not line.lstrip().startswith("#"))


@contextmanager
def prepared(
    words: list[str], hosts: dict[str, int], environment: dict[str, str], shared: Path, port: int
) -> Iterator[tuple[list[str], dict[str, str], Callable[[], None]]]:
    """Yields the command that starts `cqwen` on all hosts, its environment, and a function that stops the ranks.

    On exit, deletes the launch's files and kills its ranks. words: for `cqwen`. shared: a folder visible from every
    host. Raises `UserError` if this machine cannot launch.
    """
    for tool in ("pdsh", "ssh"):
        if which(tool) is None:
            raise UserError("--hostfile", f"no {tool} here", f"{tool}, which starts the ranks on other hosts")
    if not re.fullmatch(r"[\w./+-]+", sys.executable, re.ASCII):
        raise UserError("--hostfile", sys.executable, "a Python in a path of plain letters: ssh hands it to a shell")
    token = secrets.token_hex(6)
    with writing("run.dir", shared, "a folder that can be written"):
        shared.mkdir(parents=True, exist_ok=True)
    secret = shared / f".environment-{token}.json"
    word = Order(token, words, os.getcwd(), environment_file=str(secret)).encode()
    with ExitStack() as at_end:
        local = Path(at_end.enter_context(TemporaryDirectory()))
        at_end.callback(secret.unlink, missing_ok=True)
        # Mode 0600 from the first moment, because the environment may contain tokens.
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(environment, file)
        hostfile, variables = local / "hostfile", local / "environment"
        hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()), encoding="utf-8")
        # The launchers need no GPU, and without this variable DeepSpeed prints a warning. Ranks detect GPUs themselves.
        variables.write_text("DS_ACCELERATOR=cpu\n", encoding="utf-8")
        own = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_DEEPSPEED)}
        own |= {"DS_ENV_FILE": str(variables), "DS_ACCELERATOR": "cpu"}
        # The brackets keep pkill's pattern from matching pkill's command line and the remote shell's.
        at_end.callback(_signal, "KILL", f"[{word[0]}]{word[1:32]}", hosts)
        stop = partial(_signal, "USR1", f"[-]m {MODULE} {word[:32]}", hosts)
        # Every word is safe in a shell
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--hostfile", str(hostfile)]
        command += ["--launcher", "pdsh", "--force_multi", "--no_ssh_check", "--no_local_rank"]
        command += ["--master_addr", next(iter(hosts)).rpartition("@")[2], "--master_port", str(port)]
        yield [*command, "--module", MODULE, word], own, stop


def _signal(name: str, pattern: str, hosts: dict[str, int]) -> None:
    """Signal this launch's processes on all hosts. pattern: contains the launch's token, does not match itself."""
    command = ["pdsh", "-R", "ssh", "-t", "10", "-u", "20", "-w", ",".join(hosts), f"pkill -{name} -f '{pattern}'"]
    with suppress(subprocess.SubprocessError):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def preflight(path: Path, words: Sequence[str]) -> list[Config]:
    """Checks before ranks start: the configs of `load_configs`, their data files, and whether each run folder fits.

    Raises `UserError`.
    """
    configs = load_configs(path, words)
    for config in configs:
        watched = [(f"data.watch.{name}", source) for name, source in config.data.watch.items()]
        for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval), *watched):
            for source in as_list(sources or []):
                source_files(source, key)
        refuse_changes(config)
    return configs


def launch_command(words: list[str], ranks: int, port: int) -> list[str]:
    """The command line that runs `cqwen` with these words (a list: no shell parses the user's words).

    Without DeepSpeed's runner, which would forget CUDA_VISIBLE_DEVICES.
    """
    command = [*ranks_of_a_node(["localhost"], ranks), "--node_rank=0", "--master_addr=127.0.0.1"]
    return [*command, f"--master_port={port}", "--no_local_rank", "--module", "cqwen_dist", *words]


def launch(
    path: Path,
    overrides: Sequence[str],
    ranks: int,
    quiet: bool = False,
    hostfile: Path | None = None,
    look_first: bool = True,
) -> int:
    """Run until the end; returns the exit code for `cqwen`: 0 done, 2 wrong input, 75 stopped, 1 otherwise.

    The launcher returns 0 even if a signal killed a rank, so the runs' status files decide. overrides: with the further
    configs of a job. quiet: sends the ranks' output to stderr. hostfile: run on these hosts and ignore `ranks`.
    look_first: with a hostfile, check the hosts with a quick `cqwen doctor`.
    """
    if ranks < 1:
        raise UserError("--ranks", ranks, "1 or more")
    hosts = None if hostfile is None else read_hostfile(hostfile)
    environment = {} if hosts is None else read_environment()
    configs = preflight(path, overrides)
    configs[0].parallel.refuse_ranks(ranks if hosts is None else sum(hosts.values()))
    run_dirs = [Path(config.run.dir) for config in configs if not is_done(config)]
    if not run_dirs:
        (sys.stderr if quiet else sys.stdout).write(f"already done: {configs[0].run.dir}\n")
        return 0
    # Compare the status before and after: the launcher's exit code does not tell how the runs ended.
    before, shared = {run_dir: read_status(run_dir) for run_dir in run_dirs}, run_dirs[0].absolute()
    start = partial(_run_words, ranks=ranks, hosts=hosts, environment=environment, shared=shared)
    if hosts and look_first and (red := start(["doctor", "--quick", "--folder", str(shared)])[0]):
        sys.stderr.write("the hosts cannot run this: see the red lines above\n")
        return red
    code, stopped = start(["train", str(path.absolute()), *overrides], quiet=quiet)
    return _end_of(code, stopped, before)


def _end_of(code: int, stopped: bool, before: dict[Path, Status]) -> int:
    """The exit code of all runs. before: their status before the launch; the rest as in `_exit_code`."""
    for stacks in (each for run_dir in before for each in stacks_of(run_dir)):
        sys.stderr.write(f"a rank hung; its stacks: {stacks}\n")
    codes = {_exit_code(code, stopped, status, read_status(run_dir)) for run_dir, status in before.items()}
    return next((each for each in (2, STOPPED, 1) if each in codes), 0)


def _exit_code(code: int, stopped: bool, before: Status, after: Status) -> int:
    """code: from the launcher; stopped: on request; before, after: the run's status."""
    if code == 2:
        return code
    if after == before:  # no rank lived long enough to write a status
        return STOPPED if stopped and not code else 1
    if after["status"] == "preempted":  # by a signal to a rank; the others may have seen none, and lost that one
        return STOPPED
    return 0 if not code and after["status"] in ("done", "paused") else 1


def stacks_of(run_dir: Path) -> list[Path]:
    """Stack files of hung ranks."""
    return sorted(path for path in (run_dir / STACKS).glob("rank-*.txt") if path.stat().st_size)


def run_words(words: list[str], ranks: int, hostfile: Path | None, shared: Path) -> int:
    """Exit code of `cqwen` with these words on several ranks, here or on a hostfile's hosts; 75 after a stop."""
    hosts = None if hostfile is None else read_hostfile(hostfile)
    environment = {} if hosts is None else read_environment()
    code, stopped = _run_words(words, ranks, hosts, environment, shared.absolute())
    return STOPPED if stopped else code


def _run_words(
    words: list[str],
    ranks: int,
    hosts: dict[str, int] | None,
    environment: dict[str, str],
    shared: Path,
    quiet: bool = False,
) -> tuple[int, bool]:
    """Returns (exit code, whether a stop was requested).

    hosts: None for ranks on this machine; environment: for the hosts' ranks.
    """
    if hosts is None:
        own = {**os.environ, **rank_environment(ranks), LAUNCHER: str(os.getpid())}
        return _run_to_its_end(launch_command(words, ranks, free_port()), own, quiet)
    with prepared(words, hosts, environment, shared, free_port()) as (command, own, ask):
        # DeepSpeed changes to the current folder on each host; only `/` surely exists on all of them.
        return _run_to_its_end(command, own, quiet, ask, "/")


def _run_to_its_end(
    command: list[str],
    environment: dict[str, str],
    quiet: bool,
    ask: Callable[[], None] | None = None,
    folder: str | None = None,
) -> tuple[int, bool]:
    """Run a command until it and all its processes have ended. Returns (exit code, whether a stop was requested).

    The command runs in a separate session, so only this process receives signals. The first signal is forwarded to the
    ranks as SIGUSR1, repeatedly because a rank may still be starting; they stop in order. The launcher in between would
    kill them on SIGINT or SIGTERM, and would die from SIGUSR1. So it starts with SIGUSR1 blocked, and the ranks unblock
    it (`parallel.stop`). A second signal ends the session: SIGTERM, then SIGKILL after a grace period. ask: asks ranks
    on other hosts to stop.
    """
    signals = 0

    def stop(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            raise KeyboardInterrupt

    # Before the process starts, so that no signal is missed.
    handlers = {number: signal.signal(number, stop) for number in taken()}
    # A child process inherits the mask: the launcher starts with SIGUSR1 blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    output = sys.stderr if quiet else None
    process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True, cwd=folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    announced = False
    try:
        while process.poll() is None:
            if signals:
                if not announced:
                    sys.stderr.write("stopping the ranks at the next step; the same command resumes from there\n")
                    announced = True
                if ask is not None:
                    ask()
                else:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        return process.returncode, signals > 0
    except KeyboardInterrupt:
        sys.stderr.write("ending the ranks; the same command resumes from the last checkpoint\n")
        return 1, True
    finally:
        # Ignore further signals: leaving early would orphan ranks.
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        _end_session(process)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, for all remaining processes in the session."""
    began = time.monotonic()
    with suppress(ProcessLookupError):  # none is left
        while (waited := time.monotonic() - began) < 1.5 * GRACE_S:
            process.poll()
            os.killpg(process.pid, signal.SIGTERM if waited < GRACE_S else signal.SIGKILL)
            time.sleep(0.1)
    process.wait()
