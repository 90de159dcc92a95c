"""Pretraining of a small base model by ordinary cross-entropy, so that a run has knowledge to preserve; not a stage.

With a real vocabulary nearly all of the work would go into rows that never occur. `rows: occurring` trains a model of
the occurring rows alone and widens it afterwards. The added rows are noisy copies of rare words' rows: a real model
knows as little of words that it has hardly seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.config import Config, PretrainConfig
from cqwen_dist.data.collate import Sample
from cqwen_dist.data.dataset import tokenise
from cqwen_dist.data.loader import Loader, Samples
from cqwen_dist.data.sources import ReadReport, Text, read_texts
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.model.backbone import build_base

RARE = 0.25  # share of the occurring words, rarest first, whose rows are copied
NOISE = 0.1  # of an added row, in standard deviations of the rare rows
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class Mixture:
    """Several datasets in a row."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = parts
        self.pad_token_id, self.num_token_id = parts[0].pad_token_id, parts[0].num_token_id
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][index - int(self._ends[part - 1] if part else 0)]


def further_texts(config: Config) -> list[Text]:
    """The texts that the pretraining alone reads. Raises `UserError`."""
    data = None if config.model.pretrain is None else config.model.pretrain.data
    sources = [] if data is None else [data] if isinstance(data, str) else data
    report = ReadReport()
    return [text for source in sources for text in read_texts(source, config.data, report, "model.pretrain.data")]


def read_for_pretraining(
    config: Config, texts: list[Text], tokenizer: NumericalAwareTokenizer, numerals: str
) -> Samples:
    """Texts tokenised; numerals: as numbers (values unseen by the pretraining), as digits, or every text both ways."""
    readers: list[NumericalAwareTokenizer] = []
    if numerals != "digits":
        readers.append(tokenizer)
    if numerals != "numbers":
        readers.append(DigitTokenizer(tokenizer.tokenizer, tokenizer.num_token_id, policy=tokenizer.policy))
    return Mixture([tokenise(texts, reader, config.data) for reader in readers])


def pretrain_base(
    base: Any,
    architecture: dict[str, Any],
    data: Samples,
    plan: PretrainConfig,
    seed: int,
    say: Callable[[str], None],
    device: torch.device,
) -> None:
    """Pretrain a base of this architecture in place (CPU, fp32), working on `device`; on CUDA under bf16 autocast."""
    if plan.rows == "all":
        pretrain(base.to(device), data, plan, seed, say)
        base.cpu()
        return
    counts = row_counts(data, base.config.vocab_size)
    rows = np.flatnonzero(counts)
    lookup = torch.zeros(len(counts), dtype=torch.int64)
    lookup[torch.from_numpy(rows)] = torch.arange(len(rows))
    say(f"pretraining the {len(rows):,} rows of {len(counts):,} that occur")
    small: Any = build_base({**architecture, "vocab_size": len(rows)}, seed)
    pretrain(small.to(device), data, plan, seed, say, lookup)
    widen(base, small.cpu(), rows, counts[rows], seed)


def row_counts(data: Samples, vocab_size: int) -> np.ndarray:
    """[V] int64: how often each id occurs; the padding's id counts at least once."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(data)):
        for document in data[index]:
            np.add.at(counts, document.ids, 1)
    counts[data.pad_token_id] = max(counts[data.pad_token_id], 1)
    return counts


@torch.no_grad()
def widen(base: Any, small: Any, rows: np.ndarray, counts: np.ndarray, seed: int) -> None:
    """Fill a base of the whole vocabulary from one of the rows [n] that occur (counts [n], in the rows' order).

    Row rows[i] becomes the small model's row i, exactly. The others copy a random row of the RARE rarest, plus noise.
    """
    given = small.state_dict()
    draw = torch.Generator().manual_seed(seed)
    rare = torch.from_numpy(np.argsort(counts, kind="stable")[: math.ceil(RARE * len(rows))])
    donors = rare[torch.randint(len(rare), (base.config.vocab_size,), generator=draw)]
    for name, parameter in base.named_parameters():
        learnt = given[name]
        if name in TABLES:
            spread = learnt[rare].std(correction=0)
            parameter.copy_(learnt[donors] + NOISE * spread * torch.randn(parameter.shape, generator=draw))
            parameter[torch.from_numpy(rows)] = learnt
        else:
            parameter.copy_(learnt)


def pretrain(
    base: Any,
    dataset: Samples,
    plan: PretrainConfig,
    seed: int,
    say: Callable[[str], None],
    lookup: Tensor | None = None,
) -> float:
    """Next-token cross-entropy over ids alone, in place, where the base lies; returns the last loss.

    lookup [V]: the base's row of each id (default: its own).
    """
    device = next(base.parameters()).device
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
        batch_on_device = _renumbered(batch, lookup).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = base(
                input_ids=batch_on_device.input_ids, position_ids=batch_on_device.position_ids, use_cache=False
            ).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch_on_device.labels.flatten())
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


def _renumbered(batch: Batch, lookup: Tensor | None) -> Batch:
    if lookup is None:
        return batch
    ignored = batch.labels == IGNORE_INDEX
    labels = lookup[batch.labels.masked_fill(ignored, 0)].masked_fill(ignored, IGNORE_INDEX)
    return replace(batch, input_ids=lookup[batch.input_ids], labels=labels)
