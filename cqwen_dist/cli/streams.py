"""What a command prints to: a disk that is full is told in one line, and a console that is gone ends no training."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said


class Stream(io.TextIOWrapper):
    """stdout or stderr. What cannot be written is lost; the verb decides whether that is an error."""

    outlived = False  # True: nobody has to read it
    _met: OSError | None = None

    def write(self, text: str) -> int:
        try:
            if self._met is None:
                return super().write(text)
        except OSError as error:
            self._lose(error)
        self._refuse()
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)
        self._refuse()

    def _lose(self, error: OSError) -> None:
        """What is in the buffer, and all that comes, goes nowhere: at its exit Python flushes once more."""
        self._met = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)

    def _refuse(self) -> None:
        if self._met is None or self.outlived:
            return
        if self._met.errno == errno.EPIPE:  # `| head`: who read it has had enough
            raise SystemExit(1)
        raise UserError("output", Said(self._met.strerror or str(self._met)), "a place that can be written")


def guard() -> None:
    """Make them of this process's stdout and stderr."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            options: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, Stream(stream.buffer, stream.encoding, stream.errors, **options))


def outlive() -> None:
    """A run goes on without them: a closed terminal and `| head` are no failures of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Stream):
            stream.outlived = True
