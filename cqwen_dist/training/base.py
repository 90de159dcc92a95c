"""The base model of a run: one that exists, or a small one built from the config, once, in the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.config import TRAIN_TOKENIZER, Config, UserError
from cqwen_dist.data.dataset import tokenise
from cqwen_dist.data.sources import ReadReport, read_split
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.model.backbone import build_base
from cqwen_dist.run.files import let_read
from cqwen_dist.training.pretrain import pretrain

CPU = torch.device("cpu")


def load_tokenizer(config: Config) -> NumericalAwareTokenizer:
    """The run's tokenizer. Raises `UserError`."""
    return NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, config.model.num_token_id, policy=config.data.numbers
    )


def build_run_base(config: Config, say: Callable[[str], None], device: torch.device | None = None) -> None:
    """Build (and pretrain) the base of a config with `architecture`, unless the run's folder holds it already.

    One process; atomic: the folder appears whole; on a CPU (the default device) deterministic. Raises `UserError`.
    """
    architecture = config.model.architecture
    folder = Path(config.base_folder)
    if architecture is None or folder.is_dir():
        return
    if config.model.tokenizer is None:
        raise UserError(
            "model.tokenizer", "no value", "a tokenizer's folder or hub name, or `train` to build one from the data"
        )
    base: Any = build_base(architecture, config.train.seed)
    vocab_size = base.config.vocab_size
    reads = config.model.tokenizer == TRAIN_TOKENIZER or config.model.pretrain is not None
    texts = read_split(config.data, ReadReport())[0] if reads else []
    beside = folder.with_name(".base.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    if config.model.tokenizer == TRAIN_TOKENIZER:
        trained = train_tokenizer([text.text for text in texts], vocab_size - 1, config.data.numbers)
        tokenizer = NumericalAwareTokenizer(trained, config.model.num_token_id, vocab_size, config.data.numbers)
        tokenizer.save_pretrained(beside)
    else:
        tokenizer = load_tokenizer(config)
    if tokenizer.rows_for(vocab_size) > vocab_size:
        raise UserError("model.architecture.vocab_size", vocab_size, f"{tokenizer.num_token_id + 1} or more, for <NUM>")
    if config.model.pretrain is not None:
        data = tokenise(texts, tokenizer, config.data)
        pretrain(base.to(device or CPU), data, config.model.pretrain, config.train.seed, say)
        base.cpu()
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.eos_token_id  # where generation ends
    base.save_pretrained(beside)
    let_read(beside)
    beside.rename(folder)
