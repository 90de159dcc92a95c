"""Texts tokenised, in memory (`tokenise`) or once for all runs: kept in a folder named by a digest of all inputs.

    ROOT/KEY/
      train.arrow, eval.arrow    `cqwen_dist.data.store.SCHEMA` rows
      held_out.npy               train.arrow rows held out by `eval_fraction`
      manifest.json              inputs, counts, skipped lines, file sizes, content digests

KEY is a digest over the sources' content, the tokenizer and the `data` keys that affect tokens (not those that only
affect how samples are cut). A folder is written under a temporary name, under a lock, and renamed when complete.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock

from cqwen_dist.config.data import DataConfig, as_list, source_files
from cqwen_dist.config.errors import UserError, reason_of, writing
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.chunk import Recipe, encode_blocks, encode_chunk
from cqwen_dist.data.dataset import DataReport, TextDataset
from cqwen_dist.data.records import Block, ReadReport, Text
from cqwen_dist.data.sources import chunks, extractor_of, held_out, read_texts, train_blocks
from cqwen_dist.data.store import SCHEMA, TokenStore, first_of_digests
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.run.files import appearing, key_digest, known_digest, sync

FORMAT = 11  # increase it when code reads numbers or writes rows differently
MANIFEST = "manifest.json"
HELD_OUT = "held_out.npy"
# `data` keys that do not change tokens.
_OF_SAMPLES = {*("train", "eval", "watch", "recipe"), *("sequence_length", "long_texts", "pack", "cache_dir")}

# Called with the number of texts and tokens so far.
Progress = Callable[[int, int], None]


def prepare(
    config: DataConfig, tokenizer: NumericalAwareTokenizer, progress: Progress | None = None, workers: int | None = None
) -> Path:
    """Prepare this data unless its folder exists; returns the folder. One process builds it, others wait.

    workers: number of processes that tokenise; default: one per core. It does not change the folder.
    Raises: UserError for bad data or an unwritable folder; no partial folder remains.
    """
    root = Path(config.cache_dir or os.environ.get("CQWEN_DATA_CACHE") or "~/.cache/cqwen/data").expanduser()
    with writing("data.cache_dir", root, "a folder to write to"):
        root.mkdir(parents=True, exist_ok=True)
        key = data_key(config, tokenizer, root)
        folder = root / key_digest(key)
        if (folder / MANIFEST).is_file():
            return folder
        with FileLock(root / f".{folder.name}.lock"):
            # Check again under the lock: another process may have built the folder while this one waited.
            if not (folder / MANIFEST).is_file():
                with appearing(folder, "data.cache_dir") as partial:
                    _Build(partial, config, tokenizer, progress, workers).run(key)
                sync(root)
    return folder


def data_key(config: DataConfig, tokenizer: NumericalAwareTokenizer, root: Path) -> dict[str, Any]:
    """Everything that affects the tokens, as plain values. File digests are cached under `root`."""
    policy, chat = tokenizer.encoder.policy, Chat(tokenizer.tokenizer)
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.encoder.fingerprint,
        "chat": chat.template if config.messages_field else None,
        "num_token_id": tokenizer.num_token_id,
        "around": [tokenizer.begin, tokenizer.eos_token_id],
        "policy": None if policy is None else policy.model_dump(),
        "data": config.model_dump(mode="json", exclude=_OF_SAMPLES),
        "train": [_content(source, config, root, "data.train") for source in as_list(config.train)],
        "eval": [_content(source, config, root, "data.eval") for source in as_list(config.eval or [])],
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest. Raises: UserError if it is missing, or if files are missing or have a wrong size."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        wrong = [name for name, size in manifest["files"].items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        raise UserError("prepared data", str(folder), f"a whole folder; delete it ({error})") from None
    if wrong:
        raise UserError("prepared data", f"{wrong[0]} of another size", f"a whole folder; delete {folder}")
    return manifest


def parts_of(folder: Path, num_token_id: int) -> dict[str, tuple[TokenStore, np.ndarray | None]]:
    """Training data and, if present, held-out data: a memory-mapped store with its rows (None: all)."""
    train = TokenStore.open(folder / "train.arrow", num_token_id)
    if (folder / HELD_OUT).is_file():
        out = np.load(folder / HELD_OUT)
        return {"train": (train, np.setdiff1d(np.arange(len(train)), out)), "eval": (train, out)}
    if (folder / "eval.arrow").is_file():
        return {"train": (train, None), "eval": (TokenStore.open(folder / "eval.arrow", num_token_id), None)}
    return {"train": (train, None)}


# ------------------------------------------------------------------------------------------------------ building


@dataclass
class _Build:
    """Builds a folder: reads, tokenises and writes each split, keeps texts for evaluation, and writes the manifest."""

    folder: Path
    config: DataConfig
    tokenizer: NumericalAwareTokenizer
    progress: Progress | None
    workers: int | None

    def __post_init__(self) -> None:
        self.began, self.texts, self.tokens = time.monotonic(), 0, 0
        self.reading, self.chat = ReadReport(), Chat(self.tokenizer.tokenizer)
        self.reports: dict[str, DataReport] = {}
        self.first: list[np.ndarray] = []  # for eval_fraction: the first bytes of each text's digest

    def run(self, key: dict[str, Any]) -> None:
        """Build everything, the manifest last. key: from `data_key`."""
        config = self.config
        overflows = {"train": self._write("train", train_blocks(config, self.reading, self.chat))}
        if config.eval is not None:
            found = (blocks(source, config, "data.eval") for source in as_list(config.eval))
            overflows["eval"] = self._write("eval", chain.from_iterable(found))
        if any(map(len, self.first)):
            np.save(self.folder / HELD_OUT, np.flatnonzero(held_out(np.concatenate(self.first), config.eval_fraction)))
            overflows["eval"], self.reports["eval"] = overflows["train"], DataReport()
        content, parts = {}, parts_of(self.folder, self.tokenizer.num_token_id)
        if config.eval is not None:
            self.reports["eval"].learnt_too = parts["eval"][0].count_in(parts["train"][0])
        for name, (store, texts) in parts.items():
            count(self.reports[name], store, texts, overflows[name])
            if not self.reports[name].texts:
                raise UserError(f"data.{name}", "no usable text", "one text or more", str(getattr(config, name)))
            content[name] = store.digest(texts)
        manifest = {
            "format": FORMAT,
            "key": key,
            "sources": {"train": config.train, "eval": config.eval},
            "content": content,
            "reading": asdict(self.reading),
            "reports": {name: asdict(report) for name, report in self.reports.items()},
            "seconds": round(time.monotonic() - self.began, 2),
            "files": {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())},
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        # Flush everything before the folder gets its final name, so that a power loss leaves no damaged data under it.
        for path in self.folder.iterdir():
            sync(path)

    def _write(self, name: str, part: Iterator[Block]) -> list[tuple[int, str]]:
        """Tokenise a split and write its file; returns the overflowing numbers as (row, place)."""
        self.reports.setdefault(name, DataReport())
        extract, recipe = extractor_of(self.config, self.reading, self.chat), recipe_of(self.tokenizer, self.config)
        overflows: list[tuple[int, str]] = []
        rows = 0
        with pa.OSFile(str(self.folder / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            workers = self.workers or len(os.sched_getaffinity(0))
            for (batch, odd), read in encode_blocks(part, extract, recipe, workers):
                self.reading.add(read)
                if self.config.eval_fraction:
                    self.first.append(first_of_digests(batch.column("digest")))
                overflows += [(rows + row, said) for row, said in odd]
                rows += batch.num_rows
                if batch.num_rows:
                    writer.write_batch(batch)
                self.texts, self.tokens = self.texts + batch.num_rows, self.tokens + len(batch.column("ids").values)
                if self.progress is not None:
                    self.progress(self.texts, self.tokens)
        return overflows


# --------------------------------------------------------------------------------------------------- parts of the key


def _content(source: str, config: DataConfig, root: Path, key: str) -> dict[str, str]:
    """Identifies a source: its kind, and a digest of its bytes (hub data sets: the revision)."""
    if source.startswith("bundled:"):
        found = hashlib.sha256()
        for text in read_texts(source, config, ReadReport(), key):
            found.update(text.text.encode() + b"\0")
        return {"kind": "bundled", "sha256": found.hexdigest()}
    name, _, split = source.partition("#")
    path = Path(name.removeprefix("hf:")).expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        digests = [f"{file.relative_to(path)} {known_digest(file, root / 'contents')}" for file in files]
        return {"kind": f"folder#{split}", "sha256": hashlib.sha256("\n".join(digests).encode()).hexdigest()}
    if source.startswith("hf:"):
        from huggingface_hub import HfApi

        try:
            info = HfApi().dataset_info("/".join(name.removeprefix("hf:").split("/")[:2]))
        except Exception as error:  # offline, unknown, private: the client raises many types
            raise UserError(key, source, f"a data set that the hub has ({reason_of(error, 120)})") from None
        return {"kind": source, "revision": str(info.sha)}
    found_files = source_files(source, key)
    if found_files != [source]:
        known = [_content(file, config, root, key) for file in found_files]
        return {"kind": "files", "sha256": hashlib.sha256(json.dumps(known).encode()).hexdigest()}
    path = Path(source).expanduser()
    return {"kind": "".join(path.suffixes[-2:]).lower(), "sha256": known_digest(path, root / "contents")}


# --------------------------------------------------------------------------------------------------------- in memory


def recipe_of(tokenizer: NumericalAwareTokenizer, config: DataConfig) -> Recipe:
    """How texts become rows. Raises: UserError for a tokenizer without an end token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("model.tokenizer", "no end token", "a tokenizer with eos_token")
    begin = () if config.messages_field else tokenizer.begin  # a chat begins as its template begins it
    added = tokenizer.tokenizer.added_tokens_decoder.get(end)
    return Recipe(tokenizer.encoder, begin, end, added and str(added), config.numeric_targets)


def tokenise(texts: Iterable[Text], tokenizer: NumericalAwareTokenizer, config: DataConfig) -> TextDataset:
    """Texts to an in-memory dataset, with an end token after each text. Raises as `recipe_of`."""
    recipe, report, rows = recipe_of(tokenizer, config), DataReport(), 0
    batches: list[pa.RecordBatch] = []
    overflows: list[tuple[int, str]] = []
    for chunk in chunks(texts):
        batch, odd = encode_chunk(chunk, recipe)
        overflows += [(rows + row, said) for row, said in odd]
        rows += len(chunk)
        batches.append(batch)
    store = TokenStore(batches, tokenizer.num_token_id)
    count(report, store, None, overflows)
    return TextDataset(store, None, config, tokenizer.pad_token_id, report)


def count(report: DataReport, store: TokenStore, texts: np.ndarray | None, overflows: list[tuple[int, str]]) -> None:
    """Fill in a report's totals for the given texts in a store."""
    own = slice(None) if texts is None else texts
    report.texts = len(store.lengths[own])
    report.tokens = int(store.lengths[own].sum(dtype=np.int64))
    report.numbers = sum(map(len, store.parts("numbers", texts)))
    report.targets = sum(map(len, store.parts("targets", texts)))
    report.overflows = int(store.column("overflows")[own].sum(dtype=np.int64))
    report.left = int(store.column("left")[own].sum(dtype=np.int64))
    report.first_overflow = next((place for row, place in overflows if texts is None or row in texts), "")
