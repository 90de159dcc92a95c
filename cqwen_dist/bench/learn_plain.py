"""The ordinary way, to compare with: the same base, PEFT's LoRA, softmax cross-entropy, numbers as digits.

Nothing of CausalQwen is in here but the reading of texts. A number is told by greedy decoding behind its prefix.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.bench.learn_data import Item, read_items
from cqwen_dist.bench.learn_measure import errors, numbers_to_tell, pieces, spread
from cqwen_dist.bench.learn_words import ROWS, measured_words, plain_scorer
from cqwen_dist.config import DataConfig
from cqwen_dist.data.dataset import tokenise
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.sources import ReadReport, Text, read_texts
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.model.backbone import load_base
from cqwen_dist.parallel.runtime import Runtime, seed_everything

NEW_TOKENS = 12  # of a decoded number at most
DECODED = 128  # prefixes decoded in one call


def plain_arm(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: fine-tune in the ordinary way and measure.

    options: base, tokenizer (folders), data (a `DataConfig` tree), steps, batch, lr, seed, lora (r, alpha, dropout,
    target_modules), digits (else <NUM> with its value unseen), last_only (the loss of what stands behind the prompt
    alone), head (train the output head too, untied), words, other, numbers (held-out files), measured (files by name
    whose words alone are measured, after training), most (so many of the numbers are told; default: all). Without
    steps it is the base that is measured.
    """
    kind = DigitTokenizer if options["digits"] else NumericalAwareTokenizer
    tokenizer = kind.from_pretrained(options["tokenizer"])
    base: Any = load_base(options["base"], torch.float32, rows_for=None if options["digits"] else tokenizer.rows_for)
    config = DataConfig.model_validate(options["data"])
    texts = list(read_texts(str(config.train), config, ReadReport()))
    test = {name: pieces(Path(options[name]), tokenizer, config) for name in ("words", "other") if options.get(name)}
    seed_everything(options["seed"])
    if options["head"]:
        base.lm_head = copy.deepcopy(base.lm_head)
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    lora = LoraConfig(**options["lora"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to(runtime.device)
    if options["head"]:
        base.lm_head.weight.requires_grad_(True)
    result: dict[str, Any] = {"before": {name: _right(model, batches) for name, batches in test.items()}}
    result["losses"] = _train(model, texts, tokenizer, config, options)
    result["after"] = {name: _right(model, batches) for name, batches in test.items()}
    if options.get("measured"):
        scorer = plain_scorer(model)
        result["measured"] = measured_words(scorer, options["measured"], tokenizer, options["tokenizer"])
    if options["digits"] and options.get("numbers"):
        result["numbers"] = _numbers(model, tokenizer, read_items(Path(options["numbers"])), options)
    return result


def _train(
    model: Any, texts: list[Text], tokenizer: NumericalAwareTokenizer, config: DataConfig, options: dict[str, Any]
) -> list[float]:
    """AdamW, cosine to a tenth, clip 1.0: as the run it is compared with; returns the losses."""
    device = next(model.parameters()).device
    prompts = {item.text: item.prompt for item in read_items(Path(str(config.train)))}
    dataset = tokenise(texts, tokenizer, config)
    batch_size, steps = options["batch"], options["steps"]
    loader = Loader(
        dataset, rank=0, world=1, global_batch_size=batch_size, micro_batch_size=batch_size, seed=options["seed"]
    )
    starts = None
    if options["last_only"]:  # unpacked, so that sample i is text i
        starts = [len(tokenizer.encode(prompts[text.text])[0]) for text in texts]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options["lr"], weight_decay=0)
    losses = []
    model.train()
    for step in range(steps):
        indices = loader.indices(step // loader.steps_per_epoch, step % loader.steps_per_epoch)
        (batch,) = next(iter(loader))
        there = batch.to(device)
        labels = there.labels
        if starts is not None:
            first = torch.tensor([starts[i] - 1 for i in indices], device=device).unsqueeze(1)
            labels = labels.masked_fill(torch.arange(labels.shape[1], device=device) < first, IGNORE_INDEX)
        loss = _backward(model, there, labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            decay = 0.5 * (1 + math.cos(math.pi * step / max(steps - 1, 1)))
            group["lr"] = options["lr"] * (0.1 + 0.9 * decay)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
    model.eval()
    return [float(loss) for loss in losses]


def _backward(model: Any, batch: Batch, labels: Tensor) -> Tensor:
    """The mean cross-entropy of labels [B,T] and its gradients, ROWS texts at a time: logits are [ROWS,T,V]."""
    total, count = torch.zeros((), device=labels.device), (labels != IGNORE_INDEX).sum()
    for ids, positions, wanted in zip(
        *(x.split(ROWS) for x in (batch.input_ids, batch.position_ids, labels)), strict=True
    ):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        keep = wanted != IGNORE_INDEX
        loss = F.cross_entropy(logits[keep].float(), wanted[keep], reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def _right(model: Any, batches: list[Batch]) -> float:
    """Share of labels that are the softmax's first."""
    model.eval()
    device = next(model.parameters()).device
    right, total = torch.zeros((), device=device), 0
    for batch in batches:
        there = batch.to(device)
        logits = model(input_ids=there.input_ids, position_ids=there.position_ids, use_cache=False).logits
        right += (logits.argmax(-1) == there.labels)[there.label_mask].sum()
        total += int(batch.label_mask.sum())
    return float(right) / max(total, 1)


@torch.no_grad()
def _numbers(
    model: Any, tokenizer: NumericalAwareTokenizer, items: list[Item], options: dict[str, Any]
) -> dict[str, Any]:
    """Errors of the numbers behind the prompts, decoded greedily; what does not read as a number is the median."""
    device = next(model.parameters()).device
    every = numbers_to_tell(items, tokenizer.policy)
    asked = [every[i] for i in spread(len(every), options.get("most"))]
    prefixes = [tokenizer.encode(items[text].text[:start])[0] for text, start, *_ in asked]
    median = float(options["median"])
    told, unread = np.full(len(asked), np.nan), 0
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    for at in range(0, len(order), DECODED):
        some = order[at : at + DECODED]
        width = max(len(prefixes[i]) for i in some)
        ids = torch.full((len(some), width), tokenizer.pad_token_id)
        mask = torch.zeros(ids.shape, dtype=torch.int64)
        for row, i in enumerate(some):
            ids[row, width - len(prefixes[i]) :] = torch.tensor(prefixes[i])
            mask[row, width - len(prefixes[i]) :] = 1
        new = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )[:, width:]
        for row, i in enumerate(some):
            text = tokenizer.tokenizer.decode(new[row], skip_special_tokens=True)
            found = [value for start, _, value in find_numbers(text, tokenizer.policy) if start <= 1]
            if found and math.isfinite(found[0]):
                told[i] = found[0]
            else:
                told[i], unread = median, unread + 1
    truth = np.array([value for _, _, value, _ in asked])
    figures = errors(truth, told, median, np.array([again for *_, again in asked]))
    return {**figures, "unread": unread, "crps": figures["mae"]}  # CRPS of a point is its error
