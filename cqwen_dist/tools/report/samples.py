"""`cqwen report --samples N`: continues held-out texts with a run's oldest and newest checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cqwen_dist.config import Config, UserError

if TYPE_CHECKING:
    from cqwen_dist.data.store import Document

LONGEST = 48  # maximum tokens in a continuation
INDIVIDUALS = 8  # drawn for each map


def sample_texts(folder: Path, config: Config, count: int) -> list[dict[str, Any]]:
    """`count` held-out texts, evenly spaced: {prompt, truth, written: [{step, text, numbers: [(value, low, high)]}],
    why, map}. `why` explains the newest checkpoint's next word, and `map` is its SVG.

    Every number has a 90 % interval, recalibrated if the checkpoint has the factors. Loads the model on the default
    device. Raises `UserError` if there are no held-out texts or no checkpoints.
    """
    from cqwen_dist.checkpoint.manifest import list_checkpoints
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.load import load_datasets
    from cqwen_dist.generate.continuation import continue_text
    from cqwen_dist.tools.report.why import picture, why

    kept = list_checkpoints(folder)
    if not kept:
        raise UserError("--samples", count, "a run that has a checkpoint")
    samples: list[dict[str, Any]] = []
    begin = config.data.messages_field is None  # a chat begins as its template says
    for checkpoint in dict.fromkeys((kept[0], kept[-1])):
        model, tokenizer = load_trained(checkpoint, "auto")
        if config.model.wide_from_eval:
            model.model.beside.train()  # use the out-of-fold fits, as the wide part was fitted to these texts
        if not samples:
            held_out = load_datasets(config.data, tokenizer).eval
            if held_out is None or not len(held_out):
                raise UserError("--samples", count, "a run with held-out texts (data.eval, data.eval_fraction)")
            for index in np.unique(np.linspace(0, len(held_out) - 1, count).astype(np.int64)):
                document = held_out[int(index)][0]
                at, ids, values = cut(document), document.ids.tolist(), document.values.tolist()
                ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id and at < len(ids) - 1 else ids
                texts = (tokenizer.decode(ids[:at], values[:at]), tokenizer.decode(ids[at:], values[at : len(ids)]))
                samples.append({"prompt": texts[0], "truth": texts[1], "length": len(ids) - at, "written": []})
        for sample in samples:  # one by one: in a batch, the longest text would determine the memory
            new = min(sample["length"], LONGEST)
            (found,) = continue_text(model, tokenizer, [sample["prompt"]], max_new_tokens=new, begin=begin)
            numbers = [(number.value, *number.intervals["0.9"]) for number in found.numbers]
            step = int(checkpoint.name.rpartition("-")[2])
            sample["written"].append({"step": step, "text": found.text, "numbers": numbers})
            sample["why"] = why(model, tokenizer, sample["prompt"], individuals=INDIVIDUALS, begin=begin)
            sample["map"] = picture(sample["why"])
    return samples


def cut(document: Document) -> int:
    """The index where the prompt ends: before the first label, before the only target, or in the middle."""
    if document.learnt is not None and not document.learnt[0]:
        return max(int(document.learnt.argmax()), 1)
    if document.targets.sum() == 1:
        return max(int(document.targets.argmax()), 1)
    return max(len(document.ids) // 2, 1)
