"""A small base model pretrained here by ordinary cross-entropy, so that a run has knowledge to preserve. No stage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cqwen_dist.config import PretrainConfig
from cqwen_dist.data.loader import Loader, Samples


def pretrain(base: Any, dataset: Samples, plan: PretrainConfig, seed: int, say: Callable[[str], None]) -> None:
    """Next-token cross-entropy over ids alone, in place, where the base lies; on CUDA under bf16 autocast.

    base: a causal language model of transformers, fp32. The values of numbers are not seen.
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
    for step, (batch,) in zip(range(plan.steps), loader, strict=False):
        batch_on_device = batch.to(device)
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
