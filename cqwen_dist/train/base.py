"""The base model of a run: one that exists, or a small one built from the config, once, in the run's folder.

A built base may be pretrained by ordinary cross-entropy for a bounded number of steps, on the same tokens with the
numbers' values unseen: then the run has a language model to preserve, as a real one has. That is no stage.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from cqwen_dist.config import TRAIN_TOKENIZER, Config, PretrainConfig, UserError
from cqwen_dist.data.dataset import TextDataset, tokenise
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.sources import ReadReport, read_split
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.model.backbone import build_base


def load_tokenizer(config: Config, vocab_size: int) -> NumericalAwareTokenizer:
    """The run's tokenizer, checked to have a spare row for <NUM>. Raises `UserError`."""
    return NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, config.model.num_token_id, vocab_size, config.data.numbers
    )


def build_run_base(config: Config, say: Callable[[str], None]) -> None:
    """Build (and pretrain) the base of a config with `architecture`, unless the run's folder holds it already.

    One process; deterministic; atomic: the folder appears whole. Raises `UserError`.
    """
    architecture = config.model.architecture
    folder = Path(config.base_folder)
    if architecture is None or folder.is_dir():
        return
    if config.model.tokenizer is None:
        raise UserError(
            "model.tokenizer", "no value", "a tokenizer's folder or hub name, or `train` to build one from the data"
        )
    base = build_base(architecture, config.train.seed)
    vocab_size = base.config.vocab_size
    texts, _ = read_split(config.data, ReadReport())
    beside = folder.with_name(".base.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    if config.model.tokenizer == TRAIN_TOKENIZER:
        trained = train_tokenizer([text.text for text in texts], vocab_size - 1, config.data.numbers)
        tokenizer = NumericalAwareTokenizer(trained, config.model.num_token_id, vocab_size, config.data.numbers)
        tokenizer.save_pretrained(beside)
    else:
        tokenizer = load_tokenizer(config, vocab_size)
    if config.model.pretrain is not None:
        pretrain(base, tokenise(texts, tokenizer, config.data), config.model.pretrain, config.train.seed, say)
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.eos_token_id  # where generation ends
    base.save_pretrained(beside)
    beside.rename(folder)


def pretrain(
    base: torch.nn.Module, dataset: TextDataset, plan: PretrainConfig, seed: int, say: Callable[[str], None]
) -> float:
    """Next-token cross-entropy over ids alone, in place; returns the last loss."""
    loader = Loader(
        dataset, rank=0, world=1, global_batch_size=plan.batch_size, micro_batch_size=plan.batch_size, seed=seed
    )
    optimizer = torch.optim.AdamW(base.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, plan.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / plan.steps))),
    )
    say(f"pretraining the tiny base model by cross-entropy: {plan.steps} steps (bounded, once, no stage)")
    began = time.monotonic()
    base.train()
    loss = torch.zeros(())
    for step, (batch,) in zip(range(plan.steps), loader, strict=False):
        logits = base(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(plan.steps // 4, 1) == 0:
            say(f"  pretraining step {step + 1}/{plan.steps}  loss {float(loss.detach()):.3f}")
    base.eval()
    say(f"  base model ready after {time.monotonic() - began:.0f} s")
    return float(loss.detach())
