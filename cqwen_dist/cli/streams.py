"""stdout and stderr: a full disk is a one-line error, and a closed console does not end training."""

import errno
import io
import os
import sys
from typing import Any

from cqwen_dist.config.errors import Said, UserError


class Stream(io.TextIOWrapper):
    """stdout or stderr. Output that cannot be written is dropped; the verb decides whether that is an error."""

    outlived = False  # True: dropped output is not an error
    _error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            if self._error is None:
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
        """Redirect the buffer and all later output to /dev/null, because Python flushes again at exit."""
        self._error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)

    def _refuse(self) -> None:
        if self._error is None or self.outlived:
            return
        if self._error.errno == errno.EPIPE:  # the reader closed the pipe, as in `| head`
            raise SystemExit(1)
        raise UserError("output", Said(self._error.strerror or str(self._error)), "a place that can be written")


def guard() -> None:
    """Replace this process's stdout and stderr with `Stream`s."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            options: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, Stream(stream.buffer, stream.encoding, stream.errors, **options))


def outlive() -> None:
    """From now on dropped output is no error: a run continues after its terminal closes, and in `| head`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Stream):
            stream.outlived = True
