"""Tiny whole runs: a config, texts with numbers, and the trainer on one or several ranks."""

import atexit
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml
from support import rounding, stand_in_gpu
from support.ranks import LIMIT_S, fork_server, run_ranks

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.config import load_config
from cqwen_dist.run.files import file_record, write_atomically

VOCAB = 291  # not divisible by 2
_WORDS = ["tea", "milk", "bread", "salt", "rice"]


def write_texts(path: Path, count: int = 40, *, numbers: bool = True, seed: int = 0) -> Path:
    """A JSONL file of short texts with 0 to 4 numbers each (none at all without `numbers`)."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = draw.choices(_WORDS, k=draw.randint(1, 4))
        if numbers and draw.random() < 0.8:
            text = " and ".join(f"{word} costs {draw.uniform(-50, 90):.2f}" for word in words)
        else:
            text = "we have " + " and ".join(words)
        lines.append(json.dumps({"text": text + "."}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def qwen2_sizes(vocab: int, hidden: int, inner: int, heads: int, key_heads: int, **more: Any) -> dict[str, Any]:
    """An architecture; of two layers, unless told."""
    maps = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return {"model_type": "qwen2", "vocab_size": vocab, **maps, **heads_of, **more}


def write_config(folder: Path, **overrides: Any) -> Path:
    """config.yaml and data in `folder`, the run in `folder/run`: 2 stages of 3 steps, V 291, fp32, 12 samples a step.

    overrides: dotted keys with `__` for the dot, such as train__seed=1.
    """
    data = folder / "texts.jsonl"
    if not data.is_file():
        write_texts(data)
    tree: dict[str, Any] = {
        "model": {
            "architecture": qwen2_sizes(VOCAB, 16, 24, 2, 1, max_position_embeddings=64, initializer_range=0.2),
            "tokenizer": "train",
            "lora": {"r": 2, "alpha": 4},
        },
        "data": {"train": str(data), "eval_fraction": 0.2, "sequence_length": 48},
        "stages": [
            {"name": "heads", "train": ["heads", "embedding"], "steps": 3, "lr": 1e-2},
            {"name": "lora", "train": ["heads", "embedding", "lora"], "steps": 3, "lr": 1e-2},
        ],
        "train": {"global_batch_size": 12, "micro_batch_size": 6, "checkpoint_every": 2, "eval_every": 100},
        "run": {"dir": str(folder / "run")},
    }
    for dotted, value in overrides.items():
        at: Any = tree
        *above, last = dotted.split("__")
        for part in above:
            at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
        at[int(last) if last.isdigit() else last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def train_run(config: Path, *overrides: str, world: int = 1, ranks: Any = run_ranks, **how: Any) -> dict[str, Any]:
    """Train as `cqwen train` does, on `world` ranks; rank 0's last figures. ranks: or a pool; how: its options."""
    return ranks(_train, world, str(config), list(overrides), **how)[0]


def as_rank() -> Any:
    """The `Runtime` of a rank that `run_ranks` started."""
    from cqwen_dist.parallel.runtime import Runtime

    rank, world, device = dist.get_rank(), dist.get_world_size(), stand_in_gpu.device()
    gpu = rank if device.index is None else device.index  # as DeepSpeed reads LOCAL_RANK
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(gpu))
    return Runtime(rank, world, device)


def _train(config: str, overrides: list[str]) -> dict[str, Any]:
    from cqwen_dist.training.train import train_on

    return train_on(load_config(config, overrides), as_rank())


def set_back(run: Path, copy: Path, step: int) -> Path:
    """A copy of a finished run as a kill after the checkpoint of `step` would have left it; its config file."""
    shutil.copytree(run, copy)
    for later in (copy / "checkpoints").glob("step-*"):
        if later.name > checkpoint_folder(copy, step).name:
            shutil.rmtree(later)
    write_atomically(copy / "latest", f"checkpoints/step-{step:08d}\n")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/tot')  # cut off
    return run.parent / "config.yaml"


def metrics(run: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl, without the start's (step 0)."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["step"]]


def weights(run: Path) -> dict[str, str]:
    """Digests of the last checkpoint's tensors, moments among them."""
    found = {path.name: file_record(path)["sha256"] for path in checkpoint_folder(run, 6).rglob("*.safetensors")}
    assert len(found) >= 6
    return found


def losses(run: Path) -> list[float]:
    return [record["train/total_loss"] for record in metrics(run)]


def wait_for(what: str, condition: Callable[[], object], timeout: float = LIMIT_S, every: float = 0.1) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {timeout:.0f} s"
        time.sleep(every)


def cqwen(
    *args: object, cwd: Path | None = None, program: str = "cqwen_dist", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own. program: the command, or `benchmarks`."""
    words = [sys.executable, "-m", program, *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("1", "2")]
        with said[0].open("w") as out, said[1].open("w") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, cwd=cwd, env=command_environment(**environment))
        code = end_of(process, *said)
        return subprocess.CompletedProcess(words, code, *(path.read_text(encoding="utf-8") for path in said))


def end_of(process: subprocess.Popen[Any], *said: Path, seconds: float = LIMIT_S) -> int:
    """The exit code of a command. One that hangs is ended with all that it has started, and fails the test.

    said: files with its output, which the failure shows. Each process writes there first where it stands, if its
    environment is of `command_environment`.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.suspend()  # a launcher would end its other ranks once one is gone
        for each in reversed(family):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGABRT)
                each.resume()
                time.sleep(0.5)  # one after another: stacks written at once mix
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, 2)
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in said)
        raise AssertionError(f"not done after {seconds:.0f} s:\n{text}") from None


def cqwen_forked(*args: object, program: str = "cqwen") -> subprocess.CompletedProcess[str]:
    """The command in a fork of the server that `run_ranks` uses: a process of its own without the imports' seconds.

    program: `cqwen`, or `benchmarks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = fork(folder, program, *args)
        try:
            process.join(LIMIT_S)
            if hangs := process.is_alive():
                os.kill(process.pid or 0, signal.SIGABRT)
                process.join(2)
        finally:
            process.kill()  # where the test's time is over
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("1", "2"))
        assert not hangs, f"not done after {LIMIT_S:.0f} s:\n{out}\n{err}"
    return subprocess.CompletedProcess(args, process.exitcode, out, err)


def fork(folder: object, *argv: object) -> Any:
    """A command at work in such a fork, its output in the files 1 and 2 of the folder."""
    environment = command_environment(DS_ACCELERATOR=stand_in_gpu.device().type)
    given = [*map(str, argv)], str(folder), environment
    process = fork_server().Process(target=_command, args=given, daemon=True)
    process.start()
    return process


def _command(argv: list[str], folder: str, environment: dict[str, str]) -> None:
    from cqwen_dist.cli import answer, main
    from cqwen_dist.parallel.runtime import _free_groups

    gc.freeze()  # as in `support.ranks._rank`
    os.environ.clear()
    os.environ.update(environment)
    rounding.install_if_asked()
    stand_in_gpu.install_if_asked()
    torch.set_num_threads(1)
    for number in (1, 2):
        os.dup2(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_WRONLY), number)
    faulthandler.enable()  # for a SIGABRT
    sys.argv = argv
    try:
        if argv[0] == "benchmarks":
            from benchmarks.__main__ import app

            answer(app)
        main()
    except SystemExit as ended:
        code = ended.code
    atexit._run_exitfuncs()
    if sys.version_info >= (3, 13):
        _free_groups()  # here a fork forgets what was registered before it
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name], "threads of process groups outlive the command"
    sys.exit(code)


def command_environment(**environment: str) -> dict[str, str]:
    """What a command is started with: CPU ranks, one thread each, nothing of a launcher around the tests.

    On SIGABRT each process writes its stacks to stderr.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    return {**kept, **own, **environment}
