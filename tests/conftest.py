"""Settings of every test: no hub, no telemetry, one thread a process, the CPU unless there is a GPU.

And the runs that several test files look at, trained once a session.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

gc.disable()  # until all tests are collected: it would look through all that they import again and again, for 8 s

# The same examples on every machine and in every run, however slow it is; others: --hypothesis-profile=default
# (Hypothesis also draws constants of the modules that are imported by then, which the tests that ran before decide.)
vars(providers)["_get_local_constants"] = lambda: providers._local_constants
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("default"), derandomize=True)
settings.load_profile("same")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some images set it, and then every rank of every test compiles the package again: a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, here and by every run that is started
os.fsync = lambda _: None  # as in `support.warm`
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    orders = {"nargs": "?", "const": "by-shape", "choices": ["by-shape", "in-order"]}
    parser.addoption("--rounding", **orders, help="as another CPU may round (support/rounding.py)")
    for devices, name in enumerate(("--stand-in-gpu", "--stand-in-gpus"), 1):
        said = f"a stand-in for so many GPUs: {devices} (support/stand_in_gpu.py)"
        parser.addoption(name, dest="stand_in", action="store_const", const=devices, help=said)


def pytest_configure(config: pytest.Config) -> None:
    if order := config.getoption("--rounding"):
        from support.rounding import ASKED, install_if_asked

        os.environ[ASKED] = order  # for the ranks
        install_if_asked()
    if devices := config.getoption("stand_in"):
        from support.stand_in_gpu import ask

        ask(devices)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton reports as leaked what nothing looks for at the end


@pytest.fixture
def cqwen(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., CompletedProcess[str]]:
    """Runs the command in this process, which has imported what it needs: cqwen(*words), as `support.runs.cqwen`."""

    def run(*words: object) -> CompletedProcess[str]:
        from cqwen_dist.cli import main

        argv = ["cqwen", *map(str, words)]
        monkeypatch.setattr(sys, "argv", argv)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return CompletedProcess(argv, code if isinstance(code, int) else int(code is not None), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """`support.ranks.Pool`: pool(fn, world, *args) runs fn on ranks that stay up for the file's tests."""
    from support.ranks import Pool

    ranks = Pool()
    yield ranks
    ranks.end()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank with a checkpoint at each of its 6 steps (stage heads to 3, stage lora from 4)."""
    return _run(tmp_path_factory.mktemp("one_rank"), world=1, micro_batch_size=12)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks."""
    return _run(tmp_path_factory.mktemp("two_ranks"), world=2, micro_batch_size=6)


def _run(folder: Path, world: int, micro_batch_size: int) -> Path:
    from support.runs import train_run, write_config

    config = write_config(
        folder,
        train__micro_batch_size=micro_batch_size,
        train__checkpoint_every=1,
        train__keep_checkpoints=9,
        run__dir=str(folder / "run"),
    )
    train_run(config, world=world)
    return folder / "run"
