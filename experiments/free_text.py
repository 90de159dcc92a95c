"""Does a frozen base help to predict a number from a free text, and what of it has to be read?

Linear models of the words and of the base: z at the last position; the states of four layers there; their means over
all positions of a row. Three sets are on every machine, the others are asked for by an option.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.numbers.adapted_base import StartingBase
from benchmarks.numbers.free_texts import RATED, RATINGS, Rows, commits, docstrings, drawn, gsm8k, rated, sources
from cqwen_dist.model.backbone import seen_inside
from cqwen_dist.model.calibration import SURE
from cqwen_dist.model.ridge import robust_ridge
from cqwen_dist.tables.baselines import EncodedRows
from cqwen_dist.tables.choices import RANDOM_FEATURES, WIDE
from cqwen_dist.tables.rows import read_table
from experiments.carte import stacked
from experiments.carte_models import SHARES, Fit, kernel, kernel_ridge
from experiments.wide_alone import fit_alone, row_prompts

HELD_OUT, RESAMPLES = 0.3, 2000
MOST_TOKENS, READ = 192, 8  # of a row; rows at a time
DEPTHS = 0.25, 0.5, 0.75, 1.0  # of the layers
WORDS, WIDE_PART, NOW, LAST, MEANS = "words", "wide part", "wide part, then z", "layers, last position", "layers, means"
JOINT = "wide part with layers, then z"  # as `cqwen fit` starts
STACKS = (WIDE_PART, MEANS), (WIDE_PART, LAST, MEANS), (WORDS, LAST, MEANS)


def written(rows: Callable[[], Rows], file: Path) -> Path:
    """A file of the rows drawn, once."""
    if not file.is_file():
        lines = [json.dumps({"text": text, "number": number}) for text, number in drawn(rows())]
        file.write_text("\n".join(lines), encoding="utf-8")
    return file


def states(base: StartingBase, prompts: list[str], file: Path) -> np.ndarray:
    """[n,2,layers,H] fp32: at the last position, and the mean over all positions but the first, where states are huge
    and equal in all rows. Of longer rows the last MOST_TOKENS are read."""
    if file.is_file():
        return np.asarray(np.load(file))
    tokens, found = base.encode(prompts), np.empty(0, np.float32)
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row][0]))
    for some in np.array_split(order, -(-len(order) // READ)):
        cut = [(tokens[row][0][-MOST_TOKENS:], tokens[row][1][-MOST_TOKENS:]) for row in some]
        count = torch.tensor([len(ids) for ids, _ in cut])
        transformer = base.features.backbone.transformer
        with torch.inference_mode(), seen_inside(transformer, output_hidden_states=True) as seen:
            base.z(cut)
        layers = len(seen["hidden_states"]) - 1
        h = torch.stack([seen["hidden_states"][round(depth * layers)] for depth in DEPTHS], 1).float()  # [B,L,T,H]
        length = h.shape[2]  # padded on the left
        inner = torch.arange(length) > length - count[:, None]
        mean = (h * inner[:, None, :, None]).sum(2) / (count - 1)[:, None, None]
        both = torch.stack([h[:, :, -1], mean], 1).numpy()
        found = found if len(found) else np.empty((len(tokens), *both.shape[1:]), np.float32)
        found[some] = both
    np.save(file, found)
    return found


def fits_of(file: Path, target: str, base: StartingBase, out: Path) -> tuple[np.ndarray, dict[str, Fit]]:
    """The held-out targets, and every model's predictions."""
    table = read_table(str(file), target)
    prompts = row_prompts(table)
    y, order = table.values(), np.random.default_rng(1).permutation(len(table.rows))
    test, train = map(np.sort, np.split(order, [round(HELD_OUT * len(y))]))
    of = EncodedRows(table, prompts, y, train)
    words = [kernel(x, train) for x in (of.pairs, of.characters)]
    by_words = [kernel_ridge(products, y, train, test) for products in words]
    best = int(by_words[1][1] < by_words[0][1])
    fits = {"always the median": Fit(*(np.full(len(rows), np.median(y[train])) for rows in (train, test)))}
    fits[WORDS] = by_words[best][0]
    x = states(base, prompts, out / f"{file.stem}.npy").astype(np.float64)
    x = (x - x[train].mean(0)) / (x[train].std(0) + 1e-6)
    z, tokens = torch.from_numpy(x[:, 0, -1]), [*base.tokenizer.encode_batch(prompts)]
    for name, layers in {NOW: None, JOINT: torch.from_numpy(x).float()}.items():
        wide = fit_alone(base.tokenizer, tokens, y, train, test, WIDE, RANDOM_FEATURES, layers)
        middle, (left_out, asked) = np.median(y[train] - wide.left_out[0]), (wide.left_out[0], wide.asked[0])
        fits.setdefault(WIDE_PART, Fit(left_out + middle, asked + middle))
        folds = torch.from_numpy(wide.folds).long() if len(wide.folds) else None
        then = robust_ridge(z[train], torch.from_numpy(y[train] - left_out), folds, SURE)
        asked = asked + (z[test] @ then.coefficients + then.intercept).numpy()
        fits[name] = Fit(left_out + then.left_out.numpy(), asked)
    for name, part in {"z": x[:, 0, -1:], LAST: x[:, 0], MEANS: x[:, 1]}.items():
        products = kernel(part.reshape(len(y), -1), train)
        fits[name] = kernel_ridge(products, y, train, test)[0]
    products *= np.trace(words[best][train]) / np.trace(products[train])
    tried = (kernel_ridge(words[best] + share * products, y, train, test) for share in SHARES)
    fits[f"one ridge: {WORDS}, {MEANS}"] = min(tried, key=lambda one: one[1])[0]
    return y[test], fits | {f"stack: {', '.join(own)}": stacked([fits[one] for one in own], y[train]) for own in STACKS}


def page(truth: np.ndarray, fits: dict[str, Fit]) -> Iterator[str]:
    """Markdown: errors, and how far the absolute one is from the present product's, with a paired bootstrap's 95 %."""
    errors = {name: np.abs(fit.test - truth) for name, fit in fits.items()}
    draw = np.random.default_rng(0).integers(0, len(truth), (RESAMPLES, len(truth)))
    yield f"| | MAE | R2 | MAE less that of {NOW} |\n|---|---|---|---|"
    for name, error in errors.items():
        more, r2 = error - errors[NOW], 1 - np.square(error).mean() / truth.var()
        low, high = np.quantile(more[draw].mean(1), [0.025, 0.975])
        yield f"| {name} | {error.mean():.3f} | {r2:.3f} | {more.mean():+.3f} ({low:+.3f} to {high:+.3f}) |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.free_text", description=__doc__)
    parser.add_argument("--base", default="bases/smollm2-135m")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--ratings", type=Path, help=RATINGS)
    parser.add_argument("--table", nargs=2, action="append", default=[], metavar=("FILE", "TARGET"), help="your own")
    parser.add_argument("--out", type=Path, default=Path("runs/free_text"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Callable[[], Rows]] = {"source": sources, "docstring": docstrings, "commits": commits}
    if options.data:
        sets["gsm8k"] = lambda: gsm8k(options.data)
    for name, of in RATED.items() if options.ratings else ():
        sets[name] = lambda of=of: rated(options.ratings, of)  # type: ignore[misc]
    base, files = StartingBase(options.base, "bf16"), [(Path(file), target) for file, target in options.table]
    files += [(written(rows, options.out / f"{name}.jsonl"), "number") for name, rows in sets.items()]
    for file, target in files:
        print(f"\n{file.stem}", *page(*fits_of(file, target, base, options.out)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
