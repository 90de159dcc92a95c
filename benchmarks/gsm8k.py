"""GSM8K as people count it: the share of problems whose final answer is exactly right, greedy.

A text's answer is the number behind its last `####`, or its last number without one. An expression is everything of
numbers and signs before an equals sign; it is miscalculated if the number behind the sign is not its value, rounded to
cents if the text rounds.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cqwen_dist.checkpoint.trained import load_trained, place_of
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.records import MARKS
from cqwen_dist.generate.continuation import continue_text

EXPRESSION = re.compile(r"(-?[\d$][\d\s.,$+\-*/x×÷()]*)=\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)")
SIGNS = str.maketrans({"x": "*", "×": "*", "÷": "/", ",": None, "$": None})
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
Writer = Callable[[Sequence[str]], list[str]]  # prompts -> the texts that follow


def read_problems(path: Path, count: int, skip: int = 0) -> list[tuple[str, str, float]]:
    """(question, answer without marks, its number) of `count` lines after `skip`. Raises `UserError` by line."""
    found = []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines()[skip : skip + count], skip + 1):
        try:
            record = json.loads(line)
            answer = MARKS.sub("", record["answer"])
            found.append((str(record["question"]), answer, float(answer.rsplit("####", 1)[1].replace(",", ""))))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            allowed = "GSM8K's fields: question, and an answer that ends with #### and a number"
            raise UserError("--data", Said("another record"), allowed, f"{path}:{at}") from None
    if not found:
        raise UserError("--data", str(path), "a file with problems")
    return found


def answer_of(text: str) -> float | None:
    """The number that a text answers with."""
    numbers = find_numbers(text.rsplit("####", 1)[-1])
    return numbers[0 if "####" in text else -1].value if numbers else None


def value_of(expression: str) -> float | None:
    """The value of an expression; None if it is none, or only a number."""
    try:
        tree = ast.parse(expression.translate(SIGNS).strip(), mode="eval").body
        alone = tree.operand if isinstance(tree, ast.UnaryOp) else tree
        return None if isinstance(alone, ast.Constant) else _value(tree)
    except (SyntaxError, TypeError, KeyError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    raise TypeError


def calculated(text: str) -> tuple[int, int]:
    """(number of expressions in a text, number of those that are miscalculated)."""
    found = [(value_of(left), float(right.replace(",", ""))) for left, right in EXPRESSION.findall(text)]
    known = [(value, said) for value, said in found if value is not None]
    wrong = [said for value, said in known if not math.isclose(value, said, rel_tol=1e-9, abs_tol=0.005 + 1e-9)]
    return len(known), len(wrong)


def judged(texts: Sequence[str], problems: Sequence[tuple[str, str, float]]) -> dict[str, Any]:
    """Shares and counts of answers. An unsolved problem is `unanswered`, or has a wrong `arithmetic`, or `plan`."""
    counts = {"problems": len(problems), "solved": 0, "unanswered": 0, "arithmetic": 0, "plan": 0}
    expressions = miscalculated = 0
    for text, (*_, truth) in zip(texts, problems, strict=True):
        made, wrong = calculated(text)
        expressions, miscalculated = expressions + made, miscalculated + wrong
        given = answer_of(text)
        solved = given is not None and math.isclose(given, truth, rel_tol=1e-9)
        kind = "solved" if solved else "unanswered" if "####" not in text else "arithmetic" if wrong else "plan"
        counts[kind] += 1
    share = counts["solved"] / len(problems)
    return {**counts, "share": share, "expressions": expressions, "miscalculated": miscalculated}


def causal_writer(folder: Path, prompt: str, new_tokens: int, device: str) -> Writer:
    """Writes with a run, a checkpoint or an export. prompt: a template over {question}."""
    model, tokenizer = load_trained(folder, device)

    def write(questions: Sequence[str]) -> list[str]:
        given = [prompt.format(question=question) for question in questions]
        return [written.text for written in continue_text(model, tokenizer, given, max_new_tokens=new_tokens)]

    return write


def plain_writer(folder: str, shots: str, prompt: str, new_tokens: int, device: str) -> Writer:
    """Writes with a causal language model of transformers. shots: solved problems before each question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    where = place_of(device)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(where).eval()

    def write(questions: Sequence[str]) -> list[str]:
        given = [shots + prompt.format(question=question) for question in questions]
        inputs = tokenizer(given, return_tensors="pt", padding=True).to(where)
        ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.split("\n\n", 1)[0] for text in texts]  # the next problem begins there

    return write


def run(
    writers: dict[str, Writer], problems: Sequence[tuple[str, str, float]], batch: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """`judged` for each writer, and its texts."""
    rows = []
    for name, write in writers.items():
        texts: list[str] = []
        for at in range(0, len(problems), batch):
            texts += write([question for question, *_ in problems[at : at + batch]])
            say(f"{name}: {len(texts)} of {len(problems)} problems")
        rows.append({"name": name, **judged(texts, problems), "texts": texts})
    return {"rows": rows}


def table(result: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    names = ("solved", "problems", "no ####", "arithmetic", "plan", "expressions", "miscalculated")
    out = Table("", *names, title="GSM8K: final answers exactly right", title_justify="left")
    for row in result["rows"]:
        parts = (row[key] for key in ("problems", "unanswered", "arithmetic", "plan", "expressions", "miscalculated"))
        out.add_row(row["name"], f"{row['share']:.1%}", *map(str, parts))
    return out
