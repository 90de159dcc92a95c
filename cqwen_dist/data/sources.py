"""Where texts come from, read lazily, every bad line named.

- `path.jsonl` (and any ending not named below): one JSON object a line, UTF-8; empty lines are passed over.
- `path.csv`, `path.tsv`: the first row names the columns; cells stand in a template as they stand in the file.
- `path.txt`: a text a line, a paragraph (empty lines between) or the whole file, as `data.sample_by` says.
- `path.parquet`: row by row; floats stand in a template in the shortest form that reads back as the same float64.
- a folder: what `datasets` saved (`save_to_disk`), or data files that it can load; `#SPLIT` behind it, default train.
- `hf:NAME`, `hf:ORG/NAME/CONFIG#SPLIT`: a data set of the Hugging Face hub, streamed.
- `bundled:diabetes`, `bundled:diabetes/train`, `bundled:diabetes/test`: see `cqwen_dist.data.diabetes`.

Files may be `.gz`. How a record becomes a text: `cqwen_dist.data.records`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.diabetes import diabetes_texts
from cqwen_dist.data.records import BadLine, Literal, ReadReport, Text, extractor, needed_fields, too_long

__all__ = ["ReadReport", "Text", "mixed", "read_split", "read_texts", "read_train"]

_BUNDLED: dict[str, Callable[[], list[str]]] = {
    "diabetes": lambda: diabetes_texts("train") + diabetes_texts("test"),
    "diabetes/train": lambda: diabetes_texts("train"),
    "diabetes/test": lambda: diabetes_texts("test"),
}
# A record and its place; or the place and why there is none.
Row = tuple[str, Mapping[str, Any] | BadLine]
_DRAWS = 4096  # of sources, at a time
_ROWS = 1024  # of a table, at a time


def read_texts(
    source: str, config: DataConfig, report: ReadReport, key: str = "data.train", chat: Chat | None = None
) -> Iterator[Text]:
    """The texts of one source in order.

    Raises: UserError for a file that is missing or cannot be read, an unknown bundled name, a data set that `datasets`
    cannot load, and, unless config.on_bad_line is skip (then they are counted in `report`), for lines that are no
    UTF-8, no JSON object, lack a field, hold something else than text, are empty or too long, and for compressed files
    that end too early.
    """
    if source.startswith("bundled:"):
        name = source.removeprefix("bundled:")
        if name not in _BUNDLED:
            raise UserError(key, source, " or ".join(f"bundled:{known}" for known in _BUNDLED))
        for number, bundled in enumerate(_BUNDLED[name](), 1):
            report.read += 1
            yield Text(bundled, f"{source}:{number}")
        return
    extract = extractor(config, chat or Chat())
    try:
        for where, record in _rows(source, config, key):
            try:
                if isinstance(record, BadLine):
                    raise record
                text = extract(record, where)
            except BadLine as bad:
                if config.on_bad_line == "error":
                    raise UserError(bad.kind, bad.found, bad.allowed, where) from None
                report.skip(bad.kind, where)
            else:
                report.read += 1
                yield text
    except OSError as error:
        raise UserError(key, source, f"a readable file ({error.strerror or error})") from None


def read_train(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> Iterator[Text]:
    """The texts of data.train, mixed and limited as the config says."""
    sources = as_list(config.train)

    def open_source(index: int) -> Iterator[Text]:
        return read_texts(sources[index], config, report, "data.train", chat)

    texts: Iterator[Text]
    if config.weights is None:
        texts = (text for i in range(len(sources)) for text in open_source(i))
    else:
        texts = mixed(open_source, config.weights, config.mix_until == "all", config.mix_seed)
    for number, text in enumerate(texts, 1):
        yield text
        if number == config.limit:
            return


def read_eval(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> Iterator[Text]:
    """The texts of data.eval. Raises: UserError where there are none."""
    none = True
    for source in as_list(config.eval or []):
        for text in read_texts(source, config, report, "data.eval", chat):
            none = False
            yield text
    if none:
        raise UserError("data.eval", "no usable text", "one text or more", str(config.eval))


def mixed(
    open_source: Callable[[int], Iterator[Text]], weights: list[float], all_of: bool, seed: int
) -> Iterator[Text]:
    """Texts of several sources, each draw's source by weight; a function of the seed (MT19937) and the sources alone.

    Ends when a source is used up; with all_of: when every source has been used up once, short ones beginning again.
    An empty source ends nothing and is drawn no more.
    """
    draw = np.random.RandomState(seed)
    shares = np.array(weights) / sum(weights)
    sources = [open_source(i) for i in range(len(weights))]
    given = [0] * len(weights)
    used_up = [False] * len(weights)
    while shares.sum() > 0:
        for i in draw.choice(len(weights), size=_DRAWS, p=shares / shares.sum()):
            text = next(sources[i], None)
            if text is None and given[i]:
                used_up[i] = True
                if not all_of or all(done or not share for done, share in zip(used_up, shares, strict=True)):
                    return
                sources[i] = open_source(i)
                text = next(sources[i], None)
            if text is None:
                shares[i] = 0.0
                used_up[i] = True
                break
            given[i] += 1
            yield text


def read_split(config: DataConfig, report: ReadReport, chat: Chat | None = None) -> tuple[list[Text], list[Text]]:
    """The training texts (the first `config.limit`) and the held-out texts, in memory.

    Without `config.eval`, `eval_fraction` of the training texts are held out: those whose SHA-256 is smallest,
    whatever their order, at least one, and equal texts stay on one side.
    Raises: what `read_texts` raises; UserError when the held-out part would be all.
    """
    texts = read_train(config, report, chat)
    train = list(unique(texts, report, Seen()) if config.deduplicate else texts)
    if config.eval is not None:
        return train, list(read_eval(config, report, chat))
    if not config.eval_fraction or not train:
        return train, []
    digests = [text_digest(text) for text in train]
    first = np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
    out = held_out(first, lambda i: digests[i], config.eval_fraction)
    rest = [text for text, is_out in zip(train, out, strict=True) if not is_out]
    return rest, [text for text, is_out in zip(train, out, strict=True) if is_out]


def text_digest(text: Text) -> bytes:
    """SHA-256 of the text [32 bytes]."""
    return hashlib.sha256(text.text.encode()).digest()


class Seen:
    """Digests that were there already, in memory."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def new(self, digest: bytes) -> bool:
        """Whether this one is new."""
        before = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) > before


def unique(texts: Iterable[Text], report: ReadReport, seen: Seen) -> Iterator[Text]:
    """The texts without those that were there already, which are counted."""
    for text in texts:
        if seen.new(text_digest(text)):
            yield text
        else:
            report.duplicates += 1


def held_out(first: np.ndarray, digest: Callable[[int], bytes], fraction: float) -> np.ndarray:
    """Which texts are held out [n] bool: those with the smallest digests. Raises: UserError when it would be all.

    Args: first [n] uint64: the first 8 bytes of each digest; where two texts agree in them, `digest` gives the whole.
    """
    count = math.ceil(fraction * len(first))
    limit = np.partition(first, count - 1)[count - 1]
    out = first < limit
    ties = sorted((digest(int(i)), int(i)) for i in np.flatnonzero(first == limit))
    last = ties[count - 1 - int(out.sum())][0]
    out[[i for whole, i in ties if whole <= last]] = True
    if out.all():
        allowed = f"less, as {len(first)} texts leave none to train on"
        raise UserError("data.eval_fraction", fraction, allowed)
    return cast(np.ndarray, out)


def as_list(sources: str | list[str]) -> list[str]:
    """One source or several, as a list."""
    return [sources] if isinstance(sources, str) else sources


# ------------------------------------------------------------------------------------------- from files to records


def _rows(source: str, config: DataConfig, key: str) -> Iterator[Row]:
    name, _, split = source.partition("#")
    path = Path(name).expanduser()
    if source.startswith("hf:") or path.is_dir():
        yield from _of_datasets(source, name, split or "train", config, key)
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(key, f"no file {source}", "an existing JSONL file, or bundled:NAME")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    ending = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]
    if ending == ".parquet":
        yield from _of_parquet(path, config)
        return
    read = {".csv": _of_csv, ".tsv": _of_csv, ".txt": _of_text}.get(ending, _of_json_lines)
    with gzip.open(path, "rb") if suffixes[-1:] == [".gz"] else path.open("rb") as file:
        lines = _Lines(cast(IO[bytes], file), path, config)
        try:
            yield from read(lines, config)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield f"{path}:{lines.number + 1}", BadLine("broken gzip", f"no whole file ({error})", "a whole gzip file")


class _Lines:
    """The lines of a file with their numbers; a line that is too long is never held, but raised as `BadLine`."""

    def __init__(self, file: IO[bytes], path: Path, config: DataConfig) -> None:
        self.file, self.path, self.config, self.number = file, path, config, 0
        self.limit = int(config.max_text_mib * 2**20)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        line = self.file.readline(self.limit + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > self.limit and not line.endswith(b"\n"):
            size = len(line)
            while line and not line.endswith(b"\n"):
                line = self.file.readline(self.limit)
                size += len(line)
            raise too_long(size, self.config)
        return line

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def _of_json_lines(lines: _Lines, config: DataConfig) -> Iterator[Row]:
    while True:
        try:
            line = next(lines)
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                yield lines.where, _parsed(line)
        except StopIteration:
            return
        except BadLine as bad:
            yield lines.where, bad


def _parsed(line: bytes) -> dict[str, Any]:
    text = _decoded(line)
    try:
        record = json.loads(text, parse_int=Literal, parse_float=Literal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadLine("broken JSON", text.strip()[:60], f"one JSON object a line ({error})") from None
    if not isinstance(record, dict):
        raise BadLine("no JSON object", text.strip()[:60], 'one JSON object a line, such as {"text": "..."}')
    return record


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", error.object[error.start : error.end], "UTF-8 text") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _of_csv(lines: _Lines, config: DataConfig) -> Iterator[Row]:
    tabs = ".tsv" in [suffix.lower() for suffix in lines.path.suffixes]
    csv.field_size_limit(max(lines.limit, 2**17))
    reader = csv.reader(map(_decoded, lines), delimiter="\t" if tabs else ",", strict=True)
    columns: list[str] | None = None
    while True:
        try:
            row = next(reader)
            if not row:
                continue
            if columns is None:
                columns = [name.strip() for name in row]
                if len(set(columns)) < len(columns) or not all(columns):
                    raise UserError("columns", columns, "a first row that gives every column a name", lines.where)
                continue
            if len(row) != len(columns):
                allowed = f"{len(columns)}, as the first row has"
                raise BadLine("wrong number of cells", len(row), allowed)
            yield lines.where, dict(zip(columns, row, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.where, BadLine("broken CSV", f"no row ({error})", "quoted cells that end, and no NUL")
        except BadLine as bad:
            yield lines.where, bad


def _of_text(lines: _Lines, config: DataConfig) -> Iterator[Row]:
    held: list[str] = []
    size, began, done = 0, 1, False
    while not done:
        text = ""
        try:
            text = _decoded(next(lines))
            size += len(text)
            if size > lines.limit:
                held, size = [], 0
                raise too_long(lines.limit, config)
        except StopIteration:
            done = True
        except BadLine as bad:
            yield lines.where, bad
            continue
        if not held:
            began = lines.number
        if text.strip() or (held and config.sample_by == "document" and not done):
            held.append(text)
        ends = done or config.sample_by == "line" or (config.sample_by == "paragraph" and not text.strip())
        if ends and held:
            yield f"{lines.path}:{began}", {config.text_field: "".join(held).strip("\r\n")}
        if ends:
            held, size = [], 0


def _of_parquet(path: Path, config: DataConfig) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            fields = needed_fields(config)
            missing = [name for name in fields if name not in file.schema_arrow.names]
            if missing:
                found, allowed = file.schema_arrow.names, f"a table with the column {missing[0]!r}"
                yield str(path), BadLine("missing field", found, allowed)
                return
            for batch in file.iter_batches(batch_size=_ROWS, columns=fields, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", record
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:100]
        yield f"{path}:{number + 1}", BadLine("broken Parquet", f"no readable table ({reason})", "a Parquet file")


def _of_datasets(source: str, name: str, split: str, config: DataConfig, key: str) -> Iterator[Row]:
    import datasets

    try:
        if source.startswith("hf:"):
            parts = name.removeprefix("hf:").split("/")
            local = Path(name.removeprefix("hf:")).expanduser().is_dir()
            cut = len(parts) if local else 2
            data: Any = datasets.load_dataset(
                "/".join(parts[:cut]), "/".join(parts[cut:]) or None, split=split, streaming=True
            )
        elif any((Path(name).expanduser() / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(str(Path(name).expanduser()))
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise UserError(key, source, f"{name}# and one of {', '.join(data)}")
                data = data[split]
        else:
            data = datasets.load_dataset(str(Path(name).expanduser()), split=split, streaming=True)
        fields = needed_fields(config)
        if data.column_names is not None:
            missing = [field for field in fields if field not in data.column_names]
            if missing:
                allowed = f"a data set with the column {missing[0]!r}"
                yield source, BadLine("missing field", data.column_names, allowed)
                return
            data = data.select_columns(fields)
        for number, record in enumerate(data, 1):
            yield f"{source}:{number}", record
    except (UserError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(key, source, f"what `datasets` can load ({reason})") from None
