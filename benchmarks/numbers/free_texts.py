"""Free texts and a number that each of them has. Two sets are on every machine."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gsm8k import read_problems

Rows = Iterator[tuple[str, float]]  # a text and its number
ROWS = 2000
LONGEST = 600  # characters of a text
NOT_CODE = {"test", "tests", "site-packages", "idlelib", "lib2to3"}  # folders of the standard library
RATINGS = "vaderSentiment-3.3.2.tar.gz"  # pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
RATED = {"film-reviews": "movieReviewSnippets", "shop-reviews": "amazonReviewSnippets", "tweets": "tweets"}


def functions() -> Iterator[tuple[str, str, float]]:
    """The standard library's functions: source, docstring, log of the bytes of their code."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if NOT_CODE & {*file.parts}:
            continue
        try:
            text = file.read_text("utf-8")
            tree, found = ast.parse(text), [compile(text, "", "exec")]
        except (SyntaxError, ValueError):
            continue
        sizes, lines = {}, text.splitlines()
        while found:
            code = found.pop()
            sizes[code.co_name, code.co_firstlineno] = len(code.co_code)
            found += [part for part in code.co_consts if hasattr(part, "co_code")]
        for of in ast.walk(tree):
            if isinstance(of, ast.FunctionDef):
                first = min([of.lineno, *(each.lineno for each in of.decorator_list)])
                if size := sizes.get((of.name, first)):
                    source = "\n".join(lines[of.lineno - 1 : of.end_lineno]).strip()
                    yield source, ast.get_docstring(of) or "", float(np.log(size))


def sources() -> Rows:
    """The standard library's functions as source, and the log of the bytes of their code."""
    return ((text, size) for text, _, size in functions() if len(text) <= LONGEST)


def docstrings() -> Rows:
    """The docstrings of these functions, and the same number."""
    return ((text[:LONGEST], size) for _, text, size in functions() if len(text) >= 40)


def commits() -> Rows:
    """The messages of this repository's commits, and the log of the lines that they change."""
    options = "git", "log", "--no-merges", "--numstat", "--format=%x01%s%n%b%x02"
    for part in subprocess.run(options, capture_output=True, text=True, check=True).stdout.split("\x01")[1:]:
        text, _, changed = part.partition("\x02")
        if lines := sum(int(n) for line in changed.splitlines() for n in line.split("\t")[:2] if n.isdigit()):
            yield text.strip()[:LONGEST], float(np.log(lines))


def gsm8k(file: Path) -> Rows:
    """The questions, and the log of their answers."""
    for question, _, answer in read_problems(file, sys.maxsize):
        if answer > 0:
            yield question, float(np.log(answer))


def rated(package: Path, name: str) -> Rows:
    """Sentences and the mean of 20 persons' ratings, -4 to 4 (Hutto and Gilbert 2014), in vaderSentiment's sdist."""
    with tarfile.open(package) as outer:
        (inside,) = (one for one in outer.getmembers() if one.name.endswith("hutto_ICWSM_2014.tar.gz"))
        data = outer.extractfile(inside).read()  # type: ignore[union-attr]
    with tarfile.open(fileobj=io.BytesIO(data)) as inner:
        lines = inner.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt").read()  # type: ignore[union-attr]
    for line in lines.decode("latin-1").splitlines():
        _, rating, text = line.split("\t", 2)
        yield text, float(rating)


def drawn(rows: Rows) -> list[tuple[str, float]]:
    """ROWS rows with different texts."""
    different = list({text: number for text, number in rows if text.strip()}.items())
    return [different[row] for row in np.random.default_rng(0).permutation(len(different))[:ROWS]]
