"""Lines of a text file, compressed or not, with their numbers."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import BadLine, Said
from cqwen_dist.data.records import MAX_TEXT, too_long

_BROKEN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)


class Lines:
    """Lines of a file, with line numbers.

    Yields a `BadLine` for an overlong line (never held in memory) and at the end of a broken gzip file.
    """

    def __init__(self, file: io.BufferedReader | gzip.GzipFile, path: Path, config: DataConfig) -> None:
        self.file, self.path, self.config, self.number = file, path, config, 0

    def __iter__(self) -> Iterator[bytes | BadLine]:
        try:
            while line := self.file.readline(MAX_TEXT + 1):
                self.number += 1
                if (size := len(line)) <= MAX_TEXT or line.endswith(b"\n"):
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = self.file.readline(MAX_TEXT)
                    size += len(line)
                yield too_long(size)
        except _BROKEN_GZIP as error:
            self.number += 1
            yield no_whole_file(error)

    def begin_with(self, sign: bytes) -> bool:
        """Whether the first non-space byte is `sign`."""
        try:
            return self.file.peek(1024).lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(sign)
        except _BROKEN_GZIP:
            return False  # the first read reports the error

    def some(self, size: int) -> bytes:
        """Read `size` bytes, fewer at the end. Raises: BadLine for a broken gzip file."""
        try:
            return self.file.read(size)
        except _BROKEN_GZIP as error:
            raise no_whole_file(error) from None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def no_whole_file(error: Exception) -> BadLine:
    return BadLine("broken gzip", f"no whole file ({error})", "a whole gzip file")


def decoded(line: bytes | BadLine) -> str:
    if isinstance(line, BadLine):
        raise line
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        allowed = f"UTF-8 text, such as iconv -f {'UTF-16' if line[0] >= 0xFE else 'WINDOWS-1252'} -t UTF-8 makes"
        if line.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")):
            allowed = "a file that is not packed, or packed by gzip with a name that ends in .gz"
        raise BadLine("not UTF-8", error.object[error.start : error.end], allowed) from None
    if "\0" in text:
        raise BadLine("not UTF-8", Said("zero bytes"), "UTF-8 text, such as iconv -f UTF-16LE -t UTF-8 makes")
    return text
