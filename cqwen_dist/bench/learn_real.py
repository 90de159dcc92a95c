"""``cqwen bench learn real``: a real base, fine-tuned on the user's texts in our way and in the ordinary one.

words    held-out texts of --data
prose    English of Python's own language reference (`pydoc_data.topics`), not trained on
code     functions of the standard library, not trained on

Arms are at equal texts, and each is shown at the rate of LoRA that leaves the least word perplexity on the held-out
texts. Words are the same for every arm (`bench.learn_words`); the base reads the text as it is, digits and all.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from cqwen_dist.bench.learn_data import Item, read_items
from cqwen_dist.bench.learn_plan import REAL_OURS, REAL_PLAIN, RealScale

Figures = dict[str, Any]
PIECE = 600  # characters of a piece of prose or code, some 130 tokens
SHORTEST = 300


def write_real(folder: Path, size: RealScale) -> None:
    """The held-out files of the experiment, from those of `learn_data.write_corpora`; always the same ones."""
    words = read_items(folder / "words-test.jsonl")[: size.held_out]
    code = [item.text for item in read_items(folder / "code-test.jsonl")]
    parts = {
        "words": words,
        "prose": [Item(text, "") for text in prose()[: size.pieces]],
        "code": [Item(_cut(text), "") for text in code if len(text) >= min(SHORTEST, max(map(len, code)))][
            : size.pieces
        ],
    }
    for name, items in parts.items():
        lines = [json.dumps({"text": item.text, "prompt": item.prompt}) + "\n" for item in items]
        (folder / f"real-{name}-test.jsonl").write_text("".join(lines), encoding="utf-8")


def prose() -> list[str]:
    """Pieces of running English, in an order that their content gives; each from another topic."""
    from pydoc_data.topics import topics

    found = []
    for text in topics.values():
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if p[:1].isalpha() and "::" not in p]
        paragraphs = [p for p in paragraphs if p.endswith(".")]
        piece = _cut(" ".join(paragraphs))
        if len(piece) >= SHORTEST:
            found.append(piece)
    return sorted(set(found), key=lambda text: hashlib.sha256(text.encode()).digest())


def _cut(text: str) -> str:
    return text if len(text) <= PIECE else text[: PIECE + 1].rsplit(None, 1)[0]


def real_rows(results: dict[str, Figures]) -> list[Figures]:
    """The base on the text as it is, then a row an arm: the rate of least word perplexity on the held-out texts."""
    found: dict[str, dict[str, Figures]] = defaultdict(dict)
    for name, result in results.items():
        if name.startswith("real ") and name != "real base":
            arm, lr = name.removeprefix("real ").rsplit(" ", 1)
            found[arm][lr] = _figures(result)
    rows = []
    if "real base" in results:
        rows.append({"arm": "base, untrained", "lr": "", **_figures(results["real base"])})
    for arm in (*REAL_OURS, *REAL_PLAIN):
        if rates := found.get(arm):
            best = min(rates, key=lambda lr: rates[lr]["words"]["perplexity"])
            rows.append({"arm": arm, "lr": best, **rates[best], "all": rates})
    return rows


def _figures(result: Figures) -> Figures:
    measured = result["measured"]
    figures: Figures = {name: measured[name] for name in ("words", "prose", "code")}
    figures["num_f1"] = measured["words"].get("num_f1")
    figures["numbers"] = result.get("numbers")
    figures["seconds"] = result.get("seconds")
    if result.get("stages"):  # every label, <NUM> included
        figures["stages"] = [
            {key: at.get(f"eval/{key}") for key in ("accuracy", "perplexity", "num_f1")} | {"stage": at["stage"]}
            for at in result["stages"]
        ]
    return figures


def real_table(rows: list[Figures]) -> Table:
    """``real_rows`` for a terminal."""
    table = Table(title="A real base, each arm at its best rate (least word perplexity)", title_justify="left")
    columns = ["arm", "LoRA lr", "words", "perplexity", "F1", "MdAE", "CRPS", "median's MdAE", "and CRPS"]
    for column in [*columns, "prose", "perplexity", "code", "perplexity", "s"]:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        told = row["numbers"] or {}
        shown = [f"{row['words']['top1']:.1%}", f"{row['words']['perplexity']:.4g}"]
        shown.append("" if row["num_f1"] is None else f"{row['num_f1']:.3f}")
        for key in ("mdae", "crps", "median_mdae", "median_mae"):
            shown.append("" if told.get(key) is None else f"{told[key]:.4g}")
        for kept in ("prose", "code"):
            shown += [f"{row[kept]['top1']:.1%}", f"{row[kept]['perplexity']:.4g}"]
        shown.append("" if row["seconds"] is None else f"{row['seconds']:.0f}")
        table.add_row(row["arm"], row["lr"], *shown)
    return table
