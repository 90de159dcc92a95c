"""Ranks on multiple hosts through the `deepspeed` launcher: pdsh over ssh, one hostfile line per host.

pdsh passes its arguments to a shell on each host, and no environment. So none of these arguments comes from the user:
the ranks' order is one encoded word (`cluster.rank`), and their environment is a file in the run folder that only its
owner can read. A stop request goes directly to the ranks, found by command line, never to their launcher: killing pdsh
would break the pipe that ranks write to while they save.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from cqwen_dist.cluster.rank import MODULE, Order
from cqwen_dist.config.errors import Said, UserError, writing
from cqwen_dist.run.files import read_small

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


def read_environment(path: Path | None) -> dict[str, str]:
    """The ranks' environment: this process's variables to pass on, then NAME=VALUE lines from the file.

    `export`, quotes around a value and a comment after it are left out. Names such as $HOME stay.
    path: default: DeepSpeed's `.deepspeed_env` in this folder or the home folder, if present. Raises `UserError`.
    """
    environment = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(PREFIXES)}
    environment |= {k: v for k, v in os.environ.items() if k.lower() in PROXIES}
    if path is None:
        usual = (Path(".deepspeed_env"), Path.home() / ".deepspeed_env")
        path = next((file for file in usual if file.is_file()), None)
    for where, line in [] if path is None else _lines(path, "--env-file"):
        if (found := _VARIABLE.fullmatch(line)) is None:
            raise UserError("--env-file", line, "NAME=VALUE, the value with two quotes around it or none", where)
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
