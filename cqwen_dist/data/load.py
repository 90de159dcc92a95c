"""A run's datasets. Small data is read into memory, large data is prepared and mapped; the samples are the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.base_model import TRAIN_TOKENIZER
from cqwen_dist.config.data import DataConfig, as_list, source_files
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.schema import Config
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.dataset import DataReport, TextDataset
from cqwen_dist.data.prepare import parts_of, prepare, read_manifest, tokenise
from cqwen_dist.data.records import ReadReport, Text
from cqwen_dist.data.sources import read_split, read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer

# Files up to this total size in bytes are read into memory (unless data.cache_dir is set).
IN_MEMORY = 32 << 20


@dataclass(frozen=True)
class Datasets:
    """Training data, held-out data (None: no evaluation) and the reading report."""

    train: TextDataset
    eval: TextDataset | None
    reading: ReadReport

    def lines(self) -> list[str]:
        """All reports, formatted for people."""
        held_out = self.eval.report.lines("eval") if self.eval is not None else []
        return [*self.reading.lines(), *self.train.report.lines("train"), *held_out]


def load_datasets(
    config: DataConfig,
    tokenizer: NumericalAwareTokenizer,
    first: Callable[[Callable[[], Any]], Any] = lambda action: action(),
) -> Datasets:
    """Load and tokenise a run's data.

    first: runs an action on one rank before the others continue. One rank prepares the data. A rank with a local disk
    does not find the folder and prepares it again. Raises: UserError, also if no training text remains.
    """
    if is_prepared(config):
        first(lambda: prepare(config, tokenizer))
        return open_prepared(prepare(config, tokenizer), config, tokenizer)
    report = ReadReport()
    train, held_out = read_split(config, report, Chat(tokenizer.tokenizer))
    found = {"train": train, "eval": held_out} if config.eval or held_out else {"train": train}
    sets = {name: tokenise(texts, tokenizer, config) for name, texts in found.items()}
    for name, part in sets.items():
        if not part.report.texts:
            raise UserError(f"data.{name}", "no usable text", "one text or more", str(getattr(config, name)))
    if (evaluated := sets.get("eval")) is not None:
        evaluated.report.learnt_too = evaluated.store.count_in(sets["train"].store)
    return Datasets(sets["train"], evaluated, report)


def read_watched(config: DataConfig, tokenizer: NumericalAwareTokenizer) -> dict[str, TextDataset]:
    """The texts of `data.watch` by name, in memory. Raises `UserError`."""
    found = {}
    for name in config.watch:
        key, own = f"data.watch.{name}", config.of_watched(name)
        found[name] = tokenise(read_texts(str(own.train), own, ReadReport(), key), tokenizer, own)
        if not found[name].report.texts:
            raise UserError(key, "no usable text", "one text or more", str(own.train))
    return found


def is_prepared(config: DataConfig) -> bool:
    """Whether this data is prepared on disk rather than read into memory."""
    if config.cache_dir is not None:
        return True
    named = (("data.train", config.train), ("data.eval", config.eval or []))
    every = [file for key, own in named for source in as_list(own) for file in source_files(source, key)]
    sources = [source for source in every if not source.startswith("bundled:")]
    if any(source.startswith("hf:") or Path(source.partition("#")[0]).expanduser().is_dir() for source in sources):
        return True
    paths = [Path(source).expanduser() for source in sources]
    return sum(path.stat().st_size for path in paths if path.is_file()) > IN_MEMORY


def open_prepared(folder: Path, config: DataConfig, tokenizer: NumericalAwareTokenizer) -> Datasets:
    """Map a prepared folder's datasets. Raises: UserError for an incomplete folder."""
    manifest = read_manifest(folder)
    sets = {}
    for name, (store, texts) in parts_of(folder, tokenizer.num_token_id).items():
        report, content = DataReport(**manifest["reports"][name]), manifest["content"][name]
        sets[name] = TextDataset(store, texts, config, tokenizer.pad_token_id, report, content)
    return Datasets(sets["train"], sets.get("eval"), ReadReport(**manifest["reading"]))


def tokenizer_of(config: Config, texts: Sequence[Text] = ()) -> NumericalAwareTokenizer:
    """The run's tokenizer. If the run folder has none yet, trains it (texts: if already read). Raises `UserError`."""
    number, policy = config.model.num_token_id, config.policy
    if config.model.tokenizer != TRAIN_TOKENIZER or Path(config.base_folder).is_dir():
        key = "model.name_or_path" if config.model.tokenizer is None else "model.tokenizer"
        return NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, number, None, policy, key)
    given = config.model.architecture or {}
    size = int({**architecture(given.get("model_type")).defaults, **given}["vocab_size"])
    learnt = [text.text for text in texts or read_split(config.data, ReadReport())[0]]
    return NumericalAwareTokenizer(train_tokenizer(learnt, size - 1, policy), number, size, policy)
