"""A table of facts, changed: what would the observed column have been, for the same individuals?"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.cells import number_in
from cqwen_dist.data.columns import cell_in
from cqwen_dist.generate.continuation import encoded
from cqwen_dist.generate.facts import NumberLaws, kept_numbers, number_laws
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.prediction.learnt_table import OUTSIDE, LearntRange, LearntTable
from cqwen_dist.prediction.table import Unread, check_new, without_prediction

FACT_COLUMNS = ("predicted", "would_be", "low_90", "high_90", "effect", "fact_within", OUTSIDE)


def changed_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    learnt: LearntTable,
    change: Mapping[str, Any],
    say: Callable[[str], None],
    unread: Unread,
    batch_size: int = 16,
) -> Iterator[dict[str, Any]]:
    """The rows with the cells of `change`, and with `FACT_COLUMNS`; the target column has what was observed.

    say: gets how the columns differ from training. unread: gets the rows that cannot be read. Raises `UserError`.
    """
    check_new(rows, FACT_COLUMNS)
    extract, known, target = learnt.extractor(), learnt.known(), str(learnt.data.target_field)
    if odd := next((name for name in change if name not in extract.inputs), None):
        raise UserError("--set", odd, f"a column that the model reads: {', '.join(extract.inputs)}")
    values = [number_in(cell_in(extract.cells, target, row.get(target))) for row in rows]
    for row, own in enumerate(rows):
        if values[row] is None:
            found = Said(f"{own.get(target) or 'nothing'} in the column {target}")
            unread[row] = UserError("FILE", found, "the number that was observed", f"record {row + 1}")
    after = [{**row, **change} for row in rows]
    sides = learnt.prompts([*rows], extract, unread, lambda _: None), learnt.prompts(after, extract, unread, say)
    for prompts, _ in sides:
        without_prediction(model, tokenizer, prompts, (), unread)
    kept = [row for row in range(len(rows)) if row not in unread]

    def answers() -> Iterator[dict[str, Any]]:
        for start in range(0, len(kept), batch_size):
            some = kept[start : start + batch_size]
            laws, outside = list[NumberLaws](), [""] * len(some)
            for prompts, cells in sides:
                laws.append(number_laws(model, tokenizer, [encoded(reader(tokenizer), prompts[row]) for row in some]))
                if known is not None:
                    laws[-1], outside = _held(laws[-1], known, [cells[row] for row in some])
            facts = kept_numbers(torch.tensor([values[row] for row in some], dtype=torch.float64), *laws)
            for fact, names in zip(facts, outside, strict=True):
                numbers = fact.predicted, fact.value, *fact.intervals["0.9"], fact.effect
                within = "outside" if fact.within is None else f"{fact.within * 100:g}"
                found = *(float(f"{number:.8g}") for number in numbers), within, names
                yield dict(zip(FACT_COLUMNS, found, strict=True))

    told, none = answers(), dict.fromkeys(FACT_COLUMNS)
    return ({**row, **(none if number in unread else next(told))} for number, row in enumerate(after))


def _held(law: NumberLaws, known: LearntRange, cells: Sequence[Mapping[str, str]]) -> tuple[NumberLaws, list[str]]:
    """(the laws as `LearntRange.held` limits them, what is outside in each row)."""
    low, high = ([f"{end}_{level * 100:g}" for level in LEVELS] for end in ("low", "high"))
    columns = [*low[::-1], "predicted", *high]
    ends = (dict(zip(columns, each, strict=True)) for each in law.ends.tolist())
    rows = [known.held(own, each, law.unit) for own, each in zip(cells, ends, strict=True)]
    held = torch.tensor([[row[name] for name in columns] for row in rows], dtype=torch.float64)
    return law._replace(ends=held), [row[OUTSIDE] for row in rows]
