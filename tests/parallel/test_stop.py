"""The flag that signals set."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cqwen_dist.parallel.collectives import Stopped, main_rank_first
from cqwen_dist.parallel.runtime import launched
from cqwen_dist.parallel.stop import SIGNALS, StopFlag


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    flag = StopFlag()
    with flag.installed():
        tell(number)
        assert flag.reason == number.name
    assert signal.getsignal(number) in (before, signal.SIG_IGN)
    signal.signal(number, before)


def test_a_signal_that_arrives_while_blocked_is_not_lost() -> None:
    """As `cqwen launch` starts its ranks, which import for seconds before they can listen."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    before = signal.getsignal(signal.SIGUSR1)
    # To this thread: another one, left by an earlier test, has not blocked it and would take it at once.
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    flag = StopFlag()
    with flag.installed():
        assert flag.reason == "SIGUSR1"
        with pytest.raises(Stopped, match="SIGUSR1"), flag.interruptible():
            raise AssertionError("it goes no further")
    signal.signal(signal.SIGUSR1, before)


def wait() -> None:
    tell(signal.SIGTERM)
    time.sleep(60)


class Interrupted(StopFlag):
    """Gets a signal at the last moment before it would interrupt."""

    def __setattr__(self, name: str, value: object) -> None:
        if (name, value) == ("_interrupt", True):
            tell(signal.SIGTERM)
        super().__setattr__(name, value)


def test_a_signal_at_the_beginning_of_an_interruptible_wait_is_not_missed() -> None:
    flag = Interrupted()
    with flag.installed(), pytest.raises(Stopped, match="SIGTERM"), flag.interruptible():
        raise AssertionError("it would wait")


def test_a_second_ctrl_c_raises_keyboard_interrupt() -> None:
    flag = StopFlag()
    with flag.installed():
        tell(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            tell(signal.SIGINT)


def agree(told: int) -> list[str]:
    """What each way of agreeing says, one rank having been told."""
    flag, heard = StopFlag(), []
    flag.agreed(torch.device("cpu"))
    if dist.get_rank() == told:
        flag.ask("SIGTERM")

    def stop() -> None:
        raise Stopped("SIGUSR1")

    for way in (lambda: flag.agreed(torch.device("cpu")), lambda: main_rank_first(stop)):
        try:
            way()
        except Stopped as stopped:
            heard.append(str(stopped))
    return heard


def test_all_ranks_learn_that_one_was_told_to_stop() -> None:
    assert run_ranks(agree, 3, 1) == [
        ["a different rank got a signal to stop", "SIGUSR1"],
        ["SIGTERM", "SIGUSR1"],
        ["a different rank got a signal to stop", "SIGUSR1"],
    ]


def told_apart(where: str) -> str:
    """What rank 0 says when rank 1 has left on a signal that rank 0 has too, or gets a little later."""
    flag = StopFlag()

    def busy() -> None:
        time.sleep(0.5)  # rank 1 has gone
        if where == "in rank 0's own work":
            tell(signal.SIGUSR1)

    with flag.installed():
        if dist.get_rank() == 1:
            dist.barrier = lambda: None  # of the harness
            return "left"
        if where != "in rank 0's own work":
            threading.Timer(1.5, lambda: tell(signal.SIGUSR1)).start()
        try:
            if where == "where ranks agree":
                with flag.excusing_lost_ranks():
                    busy()
                    flag.agreed(torch.device("cpu"))
            with flag.interruptible():
                main_rank_first(busy)
        except BaseException as error:
            dist.barrier = lambda: None
            return type(error).__name__
        return "nothing"


@pytest.mark.parametrize("where", ["in rank 0's own work", "where ranks agree"])
def test_ranks_signalled_a_little_apart_all_stop(where: str) -> None:
    assert run_ranks(told_apart, 2, where) == ["Stopped", "left"]


def test_whether_a_launcher_reads_the_exit_code() -> None:
    """Under one a stopped rank ends with 0, as it would take 75 for a failure and kill the others."""
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert [launched(known) for known in ({}, {"RANK": "0"})] == [False, False]
    assert launched({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert launched(task)
    assert not launched({**task, "SLURM_STEP_NUM_TASKS": "1"})
