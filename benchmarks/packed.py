"""Real texts padded, packed with a mask, and packed without one, compared by real tokens/s.

A padded position costs the backbone as much as a real token, and costs the heads no time. So the ideal gain from
packing is the ratio of positions per real token, and the table shows it next to the measured ratio. Rows are packed
from the full data set, as in a run, so a row contains texts with similar lengths. Padded texts are drawn at random.
Weights are random. On a CPU, seconds are CPU time, which other jobs hardly change. Ratios are medians over rounds in
which all contenders take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from benchmarks.parts import Marks, marked
from benchmarks.rig import Rig, build_rig
from benchmarks.timing import device_name, in_turn
from cqwen_dist.batch import Batch
from cqwen_dist.config import Config
from cqwen_dist.data.collate import collate
from cqwen_dist.data.dataset import TextDataset, pack
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.loader import epoch_order
from cqwen_dist.data.store import Sample
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.varlen import attend_within_texts
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.training.stages import StagePlan

PADDED, MASK, VARLEN = "padded", "packed, mask", "packed, varlen"


class Busy(Marks):
    """Marks that use CPU time as timestamps on a CPU."""

    def now(self) -> Any:
        """A timestamp, taken without waiting for the device."""
        return super().now() if self.cuda else time.process_time()


def measure(config: Config, tokenizer: NumericalAwareTokenizer, rounds: int) -> dict[str, Any]:
    """Times steps in the last stage on a micro-batch of packed rows, and on padded texts with about as many tokens.

    Returns a JSON-ready document. Raises `UserError` for unreadable data.
    """
    made = _batches(config, tokenizer)
    with _rig(config, tokenizer) as (rig, plan):
        found = in_turn({kind: partial(_seconds, rig, plan, kind, made[kind]) for kind in made}, rounds + 1)
        device = device_name(rig.runtime.device)
    return {
        "device": device,
        "precision": config.train.precision,
        "rounds": rounds,
        "rows": list(_rows(found, made)),
    }


def one_kind(config: Config, tokenizer: NumericalAwareTokenizer, kind: str) -> Iterator[dict[str, Any]]:
    """Runs one contender and yields the seconds by part and the real tokens of each step."""
    batches = _batches(config, tokenizer)[kind]
    shape = {
        "tokens": sum(int(batch.attention_mask.sum()) for batch in batches),
        "positions": sum(batch.input_ids.numel() for batch in batches),
    }
    with _rig(config, tokenizer) as (rig, plan):
        while True:
            yield {**shape, "seconds": _seconds(rig, plan, kind, batches)}


def _batches(config: Config, tokenizer: NumericalAwareTokenizer) -> dict[str, list[Batch]]:
    """The micro-batches for one step, by contender."""
    own = config.stages[-1]
    micro = config.batch_sizes(own)[1]
    length = own.sequence_length or config.data.sequence_length
    data = config.data.model_copy(update={"pack": False, "sequence_length": length})
    rows, texts = texts_of(load_datasets(data, tokenizer).train, micro, length, config.train.seed)
    padded = [texts[i : i + micro] for i in range(0, len(texts), micro)]
    ids = {"pad_token_id": tokenizer.pad_token_id, "num_token_id": tokenizer.num_token_id}
    kinds = {PADDED: padded, MASK: [rows], VARLEN: [rows]}
    return {kind: [collate(s, **ids) for s in samples] for kind, samples in kinds.items()}


@contextmanager
def _rig(config: Config, tokenizer: NumericalAwareTokenizer) -> Iterator[tuple[Rig, StagePlan]]:
    """A rig with random weights in the last stage."""
    architecture = read_architecture(config)
    architecture = {**architecture, "vocab_size": tokenizer.rows_for(int(architecture["vocab_size"]))}
    with distributed() as runtime:
        rig = build_rig(config, architecture, runtime, num_token_id=tokenizer.num_token_id)
        yield rig, rig.enter(len(config.stages) - 1)


def texts_of(dataset: TextDataset, count: int, length: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(`count` packed rows of at most `length` tokens, texts with about as many tokens), both drawn at random.

    dataset: single texts. Returns fewer rows if the data has no more.
    """
    lengths = dataset.lengths()
    found = pack(lengths, length)
    drawn = epoch_order(len(found.begin) - 1, seed, 0)[:count]
    rows = [found.pieces[found.begin[row] : found.begin[row + 1]] for row in drawn]
    order = epoch_order(len(dataset), seed, 0)
    enough = int(np.searchsorted(lengths[order].cumsum(), lengths[np.concatenate(rows)].sum())) + 1
    packed = [tuple(document for i in row for document in dataset[int(i)]) for row in rows]
    return packed, [dataset[int(i)] for i in order[:enough]]


def _seconds(rig: Rig, plan: StagePlan, kind: str, batches: Sequence[Batch]) -> dict[str, float]:
    """Seconds per part in one step."""
    if kind == VARLEN:
        attend_within_texts(rig.model.transformer)
    else:
        rig.model.transformer.set_attn_implementation("sdpa")  # type: ignore[operator]
    marks = Busy(rig.runtime.device)
    with marked(rig, marks):
        marks.end("begin")
        rig.step(list(batches), plan)
        marks.end("rest")
        return marks.seconds()


def _rows(found: dict[str, list[dict[str, float]]], made: dict[str, list[Batch]]) -> Iterator[dict[str, Any]]:
    """Yields a table row per contender. The first round is a warm-up and is not counted."""
    tokens = {kind: sum(int(batch.attention_mask.sum()) for batch in batches) for kind, batches in made.items()}
    filled = {kind: tokens[kind] / sum(batch.input_ids.numel() for batch in made[kind]) for kind in made}
    whole, backbone = (
        {
            kind: [sum(s for part, s in parts.items() if part.startswith(of)) / tokens[kind] for parts in rounds[1:]]
            for kind, rounds in found.items()
        }
        for of in ("", "backbone")
    )
    for kind in made:
        over = [padded / own for padded, own in zip(backbone[PADDED], backbone[kind], strict=True)]
        predicted = filled[kind] / filled[PADDED]
        yield {
            "name": kind,
            "shapes": [list(batch.input_ids.shape) for batch in made[kind]],
            "texts": sum(int((batch.position_ids == 0)[batch.attention_mask].sum()) for batch in made[kind]),
            "tokens": tokens[kind],
            "filled": filled[kind],
            "tokens_per_s": 1 / statistics.median(whole[kind]),
            "backbone_s_per_token": statistics.median(backbone[kind]),
            "backbone_over_padded": statistics.median(over),
            "by_padding": predicted,
            "of_prediction": statistics.median(over) / predicted,
        }


def table(result: dict[str, Any]) -> Group:
    """The result of `measure` for a terminal."""
    title = f"Packed rows and padded texts, {result['precision']}, {result['device']}"
    names = ("texts", "micro-batches", "filled", "tokens/s", "backbone", "over padded", "by padding", "of it")
    out = Table("", *(Column(name, justify="right") for name in names), title=title, title_justify="left")
    for row in result["rows"]:
        rows, width = row["shapes"][0][0], max(shape[1] for shape in row["shapes"])
        out.add_row(
            row["name"],
            str(row["texts"]),
            f"{len(row['shapes'])} of {rows} x {width}",
            f"{row['filled']:.1%}",
            f"{row['tokens_per_s']:,.0f}",
            f"{1 / row['backbone_s_per_token']:,.0f}",
            f"{row['backbone_over_padded']:.2f}",
            f"{row['by_padding']:.2f}",
            f"{row['of_prediction']:.0%}",
        )
    note = (
        "Real tokens a second, of the step and of its backbone alone. Ratios: of the backbone; by padding: of `filled`."
    )
    return Group(out, Text(note))
