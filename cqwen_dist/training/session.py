"""The session of one command on a run: locks the folder, detects hangs, and records the end in status.json."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from cqwen_dist.checkpoint.mirror import Mirror
from cqwen_dist.config.errors import DiskError, Said, reason_of
from cqwen_dist.config.schema import Config
from cqwen_dist.parallel.collectives import Stopped, main_rank_first
from cqwen_dist.parallel.failures import cause_of
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.files import AWAY, REFUSED, words_of_disk
from cqwen_dist.run.folder import open_run, refuse_changes, starts_over
from cqwen_dist.run.lock import run_lock
from cqwen_dist.run.status import RunStatus, end_status, read_status
from cqwen_dist.training.telemetry.progress import Progress

REASON = 400  # most characters of an error message in status.json; torch's messages may have pages


@contextmanager
def open_session(
    config: Config, runtime: Runtime, write_inputs: Callable[[], None] = lambda: None
) -> Iterator[RunStatus]:
    """Open and lock the run folder for the duration of the context. Collective over the world.

    write_inputs: called on rank 0 once the folder is known to belong to this run, before anything is read. If the body
    raises, status.json gets the reason: `preempted` for `Stopped`, otherwise the cause of the failure. Disk failures
    are raised as `DiskError`.
    """
    folder = Path(config.run.dir)
    with ExitStack() as held:

        def hold() -> RunStatus:
            say = Progress(0, 0).say

            def lock() -> None:
                held.enter_context(run_lock(folder))
                if config.run.mirror is None:
                    return
                mirror = Mirror(config.run.mirror, folder, say)
                if starts_over(config):
                    mirror.archive()
                elif (name := mirror.fetch(partial(refuse_changes, config))) is not None:
                    say(f"note: {name} is fetched from {config.run.mirror}")

            open_run(config, lock, say)
            write_inputs()
            return RunStatus(folder, main=True)  # here: it must not replace the failure that another rank writes next

        status = main_rank_first(hold) or RunStatus(folder, main=False)

        def tell(text: str) -> None:
            sys.stderr.write(f"{text}\n")
            status.write(reason=text)  # with the step, which is otherwise written every few seconds

        try:
            # Each rank watches itself: a hanging rank cannot be seen from outside
            held.enter_context(runtime.hang.watching(folder, runtime.rank, runtime.timeout_s, tell))
            yield status
        except Stopped as stopped:
            _stop(folder, runtime, f"signal to stop: {stopped}")
            raise
        except Exception as error:
            shown = _as_disk_error(error, folder) or error
            _end(folder, runtime, shown)
            # A disk that fails is a fault of the site: the user gets one line, not a traceback
            if shown is error:
                raise
            raise shown from None


def _stop(folder: Path, runtime: Runtime, reason: str) -> None:
    """Write the stop and its reason to status.json."""
    if runtime.is_main:
        end_status(folder, "preempted", reason)
        return
    # Before the first step a rank leaves alone, and the main rank only sees that it is lost
    before = read_status(folder)
    if before.get("total_steps") is None or before["status"] == "done":
        with suppress(OSError):  # the rank's end is still a stop
            end_status(folder, "preempted", reason)


def _end(folder: Path, runtime: Runtime, error: Exception) -> None:
    """Write the failure to status.json: `fatal` if it needs a fix, `running` if a retry may succeed."""
    cause = cause_of(error)
    if cause.passing and not runtime.is_main:
        return
    rank = "" if runtime.is_main else f"rank {runtime.rank}: "
    with suppress(OSError):  # the disk may be what failed; the error itself is on the console
        status = "running" if cause.passing else "fatal"
        end_status(folder, status, f"{cause.name}: {rank}{type(error).__name__}: {reason_of(error, REASON)}")


def _as_disk_error(error: Exception, folder: Path) -> DiskError | None:
    """Convert a disk failure to a one-line `DiskError`; None for other failures."""
    if not isinstance(error, SafetensorError) and not (isinstance(error, OSError) and error.errno in REFUSED + AWAY):
        return None
    place, message, away = words_of_disk(error, folder)
    allowed = "a disk that can be read and written; then the same command resumes"
    return DiskError("run.dir", Said(message), allowed, place, away)
