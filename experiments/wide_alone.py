"""The wide part without a base: fitted to training rows of a table, it predicts test rows, with intervals' widths.

python -m experiments.wide_alone wine_pl.parquet#price --base bases/smollm2-135m --learn 1000

Whom do 90 % intervals hold for? By tenths of the predicted size and of the text's length, and by category: with one
factor for all rows, and with one for each block of predicted sizes.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch, pad_rows
from cqwen_dist.config.data import column_lines
from cqwen_dist.data.tokenizer import Encoded, NumericalAwareTokenizer
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.prediction.table import prompts_of
from cqwen_dist.tables.choices import RANDOM_FEATURES, WIDE
from cqwen_dist.tables.fitting import EMPTY
from cqwen_dist.tables.judging import OURS, conditional, intervals
from cqwen_dist.tables.rows import Table, read_table
from cqwen_dist.tables.wide.wide_part import WidePart
from cqwen_dist.tables.wide.wide_rows import TextBefore, texts_before
from cqwen_dist.tables.wide.wide_start import fit_wide
from cqwen_dist.training.evaluation.number_metrics import interval_factors

READ = 64  # rows at a time
CALIBRATING = 400  # rows, at most, as `cqwen fit` has it
DRAWS = 4  # of them, for each fit
LEAST_CATEGORY = 100  # judged rows


class WideAlone(NamedTuple):
    """Out-of-fold g and h for n training rows, and g and h for m test rows.

    All are 0, without folds, if the median predicts as well.
    """

    left_out: np.ndarray  # [2,n]
    asked: np.ndarray  # [2,m]
    folds: np.ndarray  # [n]


def fit_alone(
    tokenizer: NumericalAwareTokenizer,
    tokens: Sequence[Encoded],
    y: np.ndarray,
    learnt: np.ndarray,
    asked: np.ndarray,
    columns: int,
    random_features: int,
    states: Tensor | None = None,
) -> WideAlone:
    """tokens, y [N]: prompts and targets. learnt [n], asked [m]: training and test rows. columns: per table. states
    [N,2,depths,H]: of a base's layers at each prompt's end, and their means over it."""
    read = torch.zeros(len(y), 0, 0, 0) if states is None else states
    words = 1 + max(tokenizer.num_token_id, *tokenizer.tokenizer.get_vocab().values())
    part = WidePart(columns, tokenizer.num_token_id, words, random_features, *read.shape[2:]).eval()
    part.begin(tokenizer.line_end_ids)
    texts: list[TextBefore] = []
    for batch, at, rows in _batches(tokens, learnt, tokenizer.pad_token_id):
        texts += texts_before(part, batch, at, read[rows].flatten(1))
    fit = fit_wide(texts, torch.from_numpy(y[learnt]), columns, random_features)
    if fit is None:
        return WideAlone(np.zeros((2, len(learnt))), np.zeros((2, len(asked))), np.zeros(0, np.int64))
    for name, table in fit.tables.items():
        part.get_parameter(name).data.copy_(table)
    found = []
    for batch, at, rows in _batches(tokens, asked, tokenizer.pad_token_id):
        of = batch.input_ids, batch.numeric_values, batch.position_ids, batch.attention_mask
        found.append(part(*of, keep=at, states=read[rows].flatten(1))[0].double().numpy())
    left_out = np.stack([fit.left_out.numpy(), fit.spread.numpy()])
    return WideAlone(left_out, np.concatenate(found, 1), np.array(fit.folds))


def half_widths(known: np.ndarray, scores: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Half-widths [m] of 90 % intervals, in scales, by predicted size, as the product has them.

    known, scores [n]: out-of-fold predictions and their errors in scales. asked [m]: predictions.
    """
    learnt, y = (Cauchy(torch.from_numpy(loc), torch.ones(len(loc))) for loc in (known, asked))
    return interval_factors(scores, learnt, (0.9,)).half_width(0.9, y).numpy()


def _batches(tokens: Sequence[Encoded], rows: np.ndarray, pad: int) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Batches of prompts, with the last position of each prompt in the flattened batch, and the rows."""
    for some in np.array_split(rows, -(-len(rows) // READ)):
        ids, values, mask = pad_rows([tokens[row] for row in some], pad, on_left=False)
        nothing, positions = torch.zeros_like(values), torch.arange(ids.shape[1]).expand_as(ids)
        at = torch.arange(len(ids)) * ids.shape[1] + mask.sum(1) - 1
        yield Batch(ids, values, mask, positions, ids, nothing, nothing.bool()), at, torch.from_numpy(some)


class Judged(NamedTuple):
    """How often 90 % intervals of a fit hold: of all judged rows, by tenths, and by category; and what they cost."""

    held: float
    size: list[float]
    length: list[float]
    category: dict[str, float]
    width: float  # mean, in scales of the target
    score: float  # the interval score (Gneiting and Raftery 2007): width, and 20 times what is missed


def judged(
    fit: WideAlone,
    y: np.ndarray,
    truth: np.ndarray,
    prompts: Sequence[str],
    cells: dict[str, Any],
    seed: int,
    one: bool,
) -> Judged:
    """y, truth: of learnt and judged rows. prompts, cells: of the judged ones. one: with one factor for all sizes."""
    middle = np.median(y - fit.left_out[0])
    some = np.random.default_rng(seed).permutation(len(y))[:CALIBRATING]
    g, scale = fit.left_out[0, some] + middle, np.exp(fit.left_out[1, some])
    asked = fit.asked[0] + middle
    half = half_widths(0 * g if one else g, np.abs(y[some] - g) / scale, asked) * np.exp(fit.asked[1])
    ends = np.stack([asked - half, asked + half], 1)
    groups = conditional({OURS: asked, "": asked}, ends, truth, prompts, cells)
    size, length = ([part["coverage_90"] for part in groups["deciles"][name]] for name in ("predicted", "length"))
    large = [part for part in groups["categories"] if part["rows"] >= LEAST_CATEGORY]
    missed = (np.abs(truth - asked) - half).clip(min=0)
    return Judged(
        intervals(ends, truth)["coverage_90"],
        size,
        length,
        {f"{part['column']} {part['value']}": part["coverage_90"] for part in large},
        float(2 * half.mean()),
        float((2 * half + 20 * missed).mean()),
    )


def row_of(found: Sequence[Judged]) -> str:
    """Cells of a Markdown row: means over fits; of tenths and categories the least and the largest mean."""
    by_category = defaultdict(list)
    for each in found:
        for name, held in each.category.items():
            by_category[name].append(held)
    size, length = (np.mean([getattr(each, name) for each in found], 0) for name in ("size", "length"))
    of = [size, length, np.array([np.mean(held) for held in by_category.values()])]
    ends = [f"{part.min():.1%} to {part.max():.1%}" if len(part) else "" for part in of]
    held, width, score = (np.mean([getattr(each, name) for each in found]) for name in ("held", "width", "score"))
    return " | ".join([f"{held:.1%}", *ends, str(len(by_category)), f"{width:.3f}", f"{score:.3f}"])


def fits_of(
    texts: Sequence[str], y: np.ndarray, base: str, learn: int, splits: int, out: Path
) -> Iterator[tuple[int, WideAlone, Any]]:
    """(split, fit, (learnt, judged rows)) of prompts and targets y; each fit is made once and kept in `out`."""
    tokenizer = NumericalAwareTokenizer.from_pretrained(base)
    tokens = [*tokenizer.encode_batch(texts)]
    for split in range(splits):
        rows = np.random.default_rng(split).permutation(len(y))
        learnt, asked, file = rows[:learn], rows[learn:], out / f"{split}.npz"
        if not file.is_file():
            np.savez(file, *fit_alone(tokenizer, tokens, y, learnt, asked, WIDE, RANDOM_FEATURES))
        with np.load(file) as kept:
            yield split, WideAlone(*(kept[name] for name in kept)), (learnt, asked)


def row_prompts(table: Table) -> list[str]:
    """The prompts as `cqwen fit` writes them."""
    return prompts_of(column_lines(table.columns) + f"{table.target}: ", table.columns, table.rows, EMPTY)


def scaled(table: Table) -> np.ndarray:
    """The targets [n] less their median, in halves of their interquartile range."""
    low, middle, high = np.quantile(table.values(), [0.25, 0.5, 0.75])
    return np.asarray((table.values() - middle) / ((high - low) / 2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.wide_alone", description=__doc__)
    parser.add_argument("tables", nargs="+", metavar="FILE#TARGET")
    parser.add_argument("--base", required=True, help="its tokenizer is read")
    parser.add_argument("--rows", type=int, default=4000, help="drawn from a larger table")
    parser.add_argument("--learn", type=int, default=1200, help="rows to learn from; the others judge")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/wide-alone"))
    options = parser.parse_args()
    print(
        "| table, factors | all | by size | by length | by category | categories | width | score |",
        "|---" * 8 + "|",
        sep="\n",
    )
    for name in options.tables:
        file, _, target = name.rpartition("#")
        table, out = read_table(file, target), options.out / Path(file).stem
        drawn = np.random.default_rng(0).permutation(len(table.rows))[: options.rows]
        table = table._replace(rows=[table.rows[row] for row in drawn])
        out.mkdir(parents=True, exist_ok=True)
        found: dict[bool, list[Judged]] = {True: [], False: []}
        y, texts = scaled(table), row_prompts(table)
        for split, fit, (learnt, asked) in fits_of(texts, y, options.base, options.learn, options.splits, out):
            columns = [column for column in table.columns if column not in table.numeric]
            cells = {column: [table.rows[row][column] for row in asked] for column in columns}
            for one, of in found.items():
                own = y[learnt], y[asked], [texts[row] for row in asked], cells
                of += [judged(fit, *own, DRAWS * split + draw, one) for draw in range(DRAWS)]
        for one, of in found.items():
            print(f"| {Path(file).stem}, {'one' if one else 'by size'} | {row_of(of)} |", flush=True)


if __name__ == "__main__":
    main()
