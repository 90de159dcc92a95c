"""The texts of `cqwen bench learn`: two corpora of different kinds and two tables of real measurements.

words    the user's JSONL (GSM8K's question and answer, or a field `text`), else the docstrings of Python's standard
         library: pretrained on and fine-tuned on
code     the standard library's functions without docstrings or comments: pretrained on, never fine-tuned on, so what
         a run does to it is forgetting
diabetes, cancer    scikit-learn's bundled studies, a row a sentence, the number to tell last

Every text has a `prompt`, its part whose numbers are given: the question, or the row's measurements.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.data.diabetes import diabetes_table, diabetes_texts
from cqwen_dist.data.sources import ReadReport, read_texts

LONGEST = 1200  # characters of a text of the standard library
SHORTEST = 120
_CANCER_TRAIN = 369
_CANCER = (
    "A cell nucleus of radius {}, texture {}, perimeter {}, area {}, smoothness {}, compactness {}, concavity {}, "
    "concave points {}, symmetry {}, fractal dimension {}. The largest area was {}."
)
WORST_AREA = 23  # column of the study: "worst area"


class Item(NamedTuple):
    """A text and its part whose numbers are given."""

    text: str
    prompt: str


class Table(NamedTuple):
    """A table's split: texts, and the same as numbers: x [n,10], y [n] float64."""

    train: list[Item]
    test: list[Item]
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def write_corpora(folder: Path, data: str | None, texts: int, held_out: int) -> dict[str, dict[str, int]]:
    """All of them as NAME-train.jsonl and NAME-test.jsonl; texts, held_out: at most so many of words and of code.

    Which texts are held out depends on their SHA-256 alone. What an earlier call of the same kind wrote stays.
    Returns the counts. Raises `UserError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, note = [data, texts, held_out], folder / "counts.json"
    if note.is_file():
        before = json.loads(note.read_text(encoding="utf-8"))
        if before["asked"] == asked:
            return dict(before["counts"])
    words = list(_docstrings()) if data is None else _user_texts(data)
    parts = {"words": _split(words, texts, held_out), "code": _split(list(_functions()), texts, held_out)}
    for name, table in tables().items():
        parts[name] = table.train, table.test
    for name, (train, test) in parts.items():
        if len(train) < 8 or len(test) < 8:
            found = Said(f"{len(train)} texts to train on, {len(test)} held out")
            raise UserError("--data", found, "8 or more of each")
        for part, items in (("train", train), ("test", test)):
            lines = [json.dumps({"text": item.text, "prompt": item.prompt}) + "\n" for item in items]
            (folder / f"{name}-{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    counts = {name: {"train": len(train), "test": len(test)} for name, (train, test) in parts.items()}
    note.write_text(json.dumps({"asked": asked, "counts": counts}), encoding="utf-8")
    return counts


def read_items(path: Path) -> list[Item]:
    """What `write_corpora` wrote."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Item(record["text"], record["prompt"]) for record in records]


def tables() -> dict[str, Table]:
    """Both tables; the splits are fixed permutations."""
    from sklearn.datasets import load_breast_cancer

    diabetes = diabetes_table()
    rows = [[_ending(text) for text in diabetes_texts(part)] for part in ("train", "test")]
    study = load_breast_cancer()
    order = np.random.RandomState(0).permutation(len(study.data))
    x, y = study.data[order, :10], study.data[order, WORST_AREA]
    items = [
        _ending(_CANCER.format(*(_plain(v) for v in (*row, target))), ".") for row, target in zip(x, y, strict=True)
    ]
    n = _CANCER_TRAIN
    return {
        "diabetes": Table(rows[0], rows[1], *diabetes),
        "cancer": Table(items[:n], items[n:], x[:n], y[:n], x[n:], y[n:]),
    }


def ridge_error(table: Table) -> float:
    """Median absolute error of a cross-validated ridge regression on the held-out rows."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 25))).fit(table.x_train, table.y_train)
    return float(np.median(np.abs(table.y_test - ridge.predict(table.x_test))))


def _plain(value: float) -> str:
    return f"{value:.6g}"


def _ending(text: str, end: str = ".") -> Item:
    """A row whose last word is the number to tell."""
    return Item(text, text[: text.rstrip(end).rindex(" ") + 1])


def _user_texts(source: str) -> list[Item]:
    """A JSONL file of `question` and `answer`, or of `text`. Raises `UserError`."""
    path = Path(source).expanduser()
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if line.strip()), "{}")
    if '"question"' not in first or '"answer"' not in first:
        return [Item(t.text, "") for t in read_texts(source, DataConfig(train=source), ReadReport(), "--data")]

    def read(template: str) -> Iterator[str]:
        config = DataConfig(train=source, text_template=template)
        return (t.text for t in read_texts(source, config, ReadReport(), "--data"))

    return [Item(t, p) for t, p in zip(read("{question}\n{answer}"), read("{question}\n"), strict=True)]


def _split(items: list[Item], texts: int, held_out: int) -> tuple[list[Item], list[Item]]:
    """(at most `texts` to train on, `held_out`); equal texts count once."""
    ordered = sorted(set(items), key=lambda item: hashlib.sha256(item.text.encode()).digest())
    return ordered[held_out : held_out + texts], ordered[:held_out]


def _docstrings() -> Iterator[Item]:
    for node in _definitions():
        text = ast.get_docstring(node)
        if text and SHORTEST <= len(text) <= LONGEST:
            yield Item(text, "")


def _functions() -> Iterator[Item]:
    for node in _definitions():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            text = ast.unparse(node)
            if SHORTEST <= len(text) <= LONGEST:
                yield Item(text, "")


def _definitions() -> Iterable[Any]:
    """Modules, classes and functions of the standard library's own source on this machine, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"} & set(parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node
