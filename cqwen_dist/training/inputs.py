"""Ranks agree on their inputs before they train: a rank with a different config, data or code is refused by name.

On a cluster a config is edited between two starts, a checkout lies on a node's own disk, or a mount is stale. Ranks
whose inputs differ in value but not in shape would train together without an error, on a loss that no config describes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import cqwen_dist
from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import KEYS, base_digest
from cqwen_dist.config import Config, DataConfig, flat
from cqwen_dist.config.custom import source_of
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import Datasets, is_prepared, load_datasets, read_watched, tokenizer_of
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.base_loading import base_folder_of
from cqwen_dist.parallel.collectives import UNSEEN, Facts, agree, first_of_host, main_rank_first
from cqwen_dist.run.environment import versions
from cqwen_dist.run.files import DIGESTS, MANIFEST, file_record


def config_facts(config: Config) -> Facts:
    """The resolved config, the package's code, the versions below it, and the modules that the config names."""
    package = Path(cqwen_dist.__file__).parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(f"{file.relative_to(package)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    facts = {key: repr(value) for key, value in flat(config.model_dump(mode="json")).items()}
    facts |= {f"package {name}": version for name, version in versions().items()}
    facts["code of cqwen_dist"] = code.hexdigest()  # a commit's name would miss edits that are not committed
    for key in ("model.abduction", "model.number_head", "loss.gate"):
        section, name = key.split(".")
        if (source := source_of(getattr(getattr(config, section), name))) is not None:
            facts[f"{key} (code)"] = _digest_of([source])
    return facts


def read_tokenizer(config: Config, resume_from: Path | None) -> tuple[NumericalAwareTokenizer, Facts]:
    """The tokenizer, once all ranks have the same one and begin with the same weights. Raises `UserError`."""
    memo = Path(config.run.dir) / DIGESTS if first_of_host() else None

    def read() -> tuple[NumericalAwareTokenizer, Facts]:
        tokenizer = tokenizer_of(config)
        # The weights that the run begins with; without a memo, another rank of this host reads large files
        facts = {"run.resume": "none" if resume_from is None else _digest_of([resume_from / MANIFEST])}
        facts[KEYS["base"]] = UNSEEN if memo is None else base_digest(base_folder_of(config.base_folder), memo)
        if config.model.warm_start is not None and memo is None:
            facts["model.warm_start"] = UNSEEN  # resolving it verifies all of its files
        elif config.model.warm_start is not None:
            source = Path(config.model.warm_start).expanduser()
            if (source / adapter.CONFIG).is_file():
                files = sorted(source.glob("adapter_*"))
            else:
                files = [resolve_checkpoint(source, "model.warm_start")[1] / MANIFEST]
            facts["model.warm_start"] = _digest_of(files)
        # Data in memory and prepared data are read by other collectives, so ranks also agree on the choice
        return tokenizer, facts | {KEYS["tokenizer"]: tokenizer.digest(), KEYS["data"]: str(is_prepared(config.data))}

    return agree(read)


def read_texts(
    config: DataConfig, tokenizer: NumericalAwareTokenizer
) -> tuple[tuple[Datasets, dict[str, TextDataset]], Facts]:
    """The run's datasets and its watched ones by name, once all ranks have the same samples. Raises `UserError`."""

    def read() -> tuple[tuple[Datasets, dict[str, TextDataset]], Facts]:
        datasets, watched = load_datasets(config, tokenizer, main_rank_first), read_watched(config, tokenizer)
        held_out = "" if datasets.eval is None else datasets.eval.digest()
        facts = {KEYS["data"]: datasets.train.digest(), KEYS["eval"]: held_out}
        facts |= {f"data.watch.{name}": dataset.digest() for name, dataset in watched.items()}
        return (datasets, watched), facts

    return agree(read)


def _digest_of(files: list[Path]) -> str:
    return hashlib.sha256("".join(str(file_record(file)["sha256"]) for file in files).encode()).hexdigest()
