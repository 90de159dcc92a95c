"""An ordinary arm: the same base, PEFT's LoRA, softmax cross-entropy, numbers as digits.

It shares only the reading of texts with CausalQwen. A number is predicted by greedy decoding after its prefix.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cqwen_dist.batch import Batch
from cqwen_dist.config import DataConfig
from cqwen_dist.config.training import Stage
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.parallel.runtime import Runtime, seed_everything
from cqwen_dist.training.stages import StagePlan
from experiments.learn.answers import errors, numbers_after_prompts, spread
from experiments.learn.corpora import Item, read_items
from experiments.learn.words import ROWS, measured_words, plain_scorer

NEW_TOKENS = 12  # of a decoded number at most
DECODED = 128  # prefixes decoded in one call


def plain_arm(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: fine-tune with ordinary LoRA and measure.

    options: base (a folder), data (a `DataConfig` tree), stage (a `Stage` tree; None measures the base itself), batch,
    seed, bf16 (products by autocast), lora (arguments of PEFT's LoraConfig), digits (False: <NUM> without its value),
    held_out (files by name), numbers (at most so many), median. Returns `words` for every file, `numbers` if digits are
    read, and the training `losses`.
    """
    kind = DigitTokenizer if options["digits"] else NumericalAwareTokenizer
    tokenizer = kind.from_pretrained(options["base"])
    base: Any = load_base(options["base"], torch.float32, rows_for=None if options["digits"] else tokenizer.rows_for)
    seed_everything(options["seed"])
    lora = LoraConfig(**options["lora"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to(runtime.device)
    # No cache: it would keep the weights in bf16 as they were at the first step
    with torch.autocast(runtime.device.type, torch.bfloat16, enabled=options["bf16"], cache_enabled=False):
        losses = [] if options["stage"] is None else _train(model, tokenizer, options)
        model.eval()
        result = {"words": measured_words(plain_scorer(model), options["held_out"], tokenizer, options["base"])}
        if options["digits"]:
            result["numbers"] = _numbers(model, tokenizer, read_items(Path(options["held_out"]["words"])), options)
    return {**result, "losses": losses}


def _train(model: Any, tokenizer: NumericalAwareTokenizer, options: dict[str, Any]) -> list[float]:
    """AdamW, clip 1.0 and the stage's schedule, as the CausalQwen runs; returns the losses."""
    device = next(model.parameters()).device
    config, stage = DataConfig.model_validate(options["data"]), Stage.model_validate(options["stage"])
    dataset = tokenise(list(read_texts(str(config.train), config, ReadReport())), tokenizer, config)
    size, steps = options["batch"], stage.steps or 0
    plan = StagePlan(stage, 0, 0, steps)
    loader = Loader(dataset, rank=0, world=1, global_batch_size=size, micro_batch_size=size, seed=options["seed"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0)
    losses = []
    model.train()
    for step, (batch,) in zip(range(steps), loader, strict=False):
        losses.append(_backward(model, batch.to(device)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = stage.lr * plan.factor(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [float(loss) for loss in losses]


def _backward(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy of a batch, with gradients, ROWS texts at a time: logits are [ROWS,T,V]."""
    total, count = torch.zeros((), device=batch.labels.device), batch.label_mask.sum()
    parts = (batch.input_ids, batch.position_ids, batch.labels)
    for ids, positions, labels in zip(*(part.split(ROWS) for part in parts), strict=True):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def _numbers(
    model: Any, tokenizer: NumericalAwareTokenizer, items: list[Item], options: dict[str, Any]
) -> dict[str, Any]:
    """Errors of the numbers after the prompts, decoded greedily; the median stands in for text that is no number."""
    device = next(model.parameters()).device
    every = numbers_after_prompts(items, tokenizer.policy)
    asked = [every[i] for i in spread(len(every), options["numbers"])]
    prefixes = [tokenizer.encode(items[text].text[:start])[0] for text, start, *_ in asked]
    median = float(options["median"])
    predicted, unread = np.full(len(asked), np.nan), 0
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    for at in range(0, len(order), DECODED):
        some = order[at : at + DECODED]
        rows = [torch.tensor(prefixes[i]) for i in some]
        ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        new = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )[:, ids.shape[1] :]
        for row, i in enumerate(some):
            text = tokenizer.tokenizer.decode(new[row], skip_special_tokens=True)
            found = [value for start, _, value in find_numbers(text, tokenizer.policy) if start <= 1]
            if found and math.isfinite(found[0]):
                predicted[i] = found[0]
            else:
                predicted[i], unread = median, unread + 1
    truth = np.array([value for _, _, value, _ in asked])
    metrics = errors(truth, predicted, median, np.array([again for *_, again in asked]))
    return {**metrics, "unread": unread, "crps": metrics["mae"]}  # CRPS of a point is its error
