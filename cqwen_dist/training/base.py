"""The base model of a run: an existing one, or a small one that is built from the config once, in the run folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cqwen_dist.config import TRAIN_TOKENIZER, Config, UserError
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import tokenizer_of
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_split
from cqwen_dist.data.tokenise import tokenise
from cqwen_dist.model.base_loading import build_base
from cqwen_dist.run.files import appearing


def build_run_base(config: Config, say: Callable[[str], None], device: torch.device) -> None:
    """Build (and pretrain) the base of a config with `architecture`, unless the run folder has it.

    Call it in one process. The folder appears atomically. Deterministic on a CPU. Raises `UserError`.
    """
    architecture = config.model.architecture
    folder = Path(config.base_folder)
    if architecture is None or folder.is_dir():
        return
    if config.model.tokenizer is None:
        allowed = "a tokenizer's folder or hub name, or `train` to build one from the data"
        raise UserError("model.tokenizer", "no value", allowed)
    base: Any = build_base(architecture, config.train.seed)
    reads = config.model.tokenizer == TRAIN_TOKENIZER or config.model.pretrain is not None
    texts = read_split(config.data, ReadReport())[0] if reads else []
    vocab_size, tokenizer = base.config.vocab_size, tokenizer_of(config, texts)
    if tokenizer.rows_for(vocab_size) > vocab_size:
        raise UserError("model.architecture.vocab_size", vocab_size, f"{tokenizer.num_token_id + 1} or more, for <NUM>")
    if config.model.pretrain is not None:
        dataset = tokenise(texts, tokenizer, config.data)
        _pretrain(base.to(device), dataset, config.model.pretrain.steps, config.train.seed, say)
        base.cpu()
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.eos_token_id  # ends generation
    with appearing(folder, "run.dir") as partial:
        if config.model.tokenizer == TRAIN_TOKENIZER:
            tokenizer.save_pretrained(partial)
        base.save_pretrained(partial)


def _pretrain(base: Any, dataset: TextDataset, steps: int, seed: int, say: Callable[[str], None]) -> None:
    """Train in place by next-token cross-entropy on ids, on the base's device; bf16 autocast on CUDA.

    base: a causal language model of transformers in fp32. Values of numbers are not used.
    """
    device = next(base.parameters()).device
    loader = Loader(dataset, rank=0, world=1, global_batch_size=32, micro_batch_size=32, seed=seed)
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    say(f"pretraining the tiny base model by cross-entropy: {steps} steps (bounded, once, no stage)")
    began = time.monotonic()
    base.train()
    for step, (cpu_batch,) in zip(range(steps), loader, strict=False):
        batch = cpu_batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = base(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(steps // 4, 1) == 0:
            say(f"  pretraining step {step + 1}/{steps}  loss {float(loss.detach()):.3f}")
    base.eval()
    say(f"  base model ready after {time.monotonic() - began:.0f} s")
