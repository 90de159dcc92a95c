"""One table, in any kind of file, is predicted alike to the bit; a table in another form is told or refused."""

from pathlib import Path
from typing import Any

import pytest
from data.test_cells import KINDS, table, written
from support.exported import tiny_pair

from cqwen_dist import api
from cqwen_dist.config import UserError
from cqwen_dist.data.cells import TableCells
from cqwen_dist.data.columns import described, forms_in, sample
from cqwen_dist.generate.table import NUMBER_COLUMNS


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_pair()


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that learnt from the CSV file."""
    records = sample(written(table().head(8), tmp_path, "csv"))
    forms = forms_in(records, "t.csv", "price")
    columns = described(records, TableCells(forms, "price"), [*records[0]][:-1])
    template = "{when} {member} {count} {share} {size}:"
    run = api._Learnt(template, "unknown", "price", forms, columns)
    monkeypatch.setattr(api, "_learnt_table", lambda *_: run)


def predicted(pair: Any, rows: Any, said: list[str], **options: Any) -> list[Any]:
    found = api.predict(pair, rows, digits=17, batch_size=8, say=said.append, **options)
    return [[row[name] for name in NUMBER_COLUMNS] for row in found]


@pytest.mark.usefixtures("learnt")
def test_every_kind_of_file_is_predicted_alike_to_the_bit(pair: Any, tmp_path: Path) -> None:
    frame, said = table().head(8).drop(columns=["at", "note", "tags"]), list[str]()
    first = predicted(pair, written(frame, tmp_path, "csv"), said)
    assert len({str(row) for row in first}) > 1
    for kind in KINDS[1:]:
        options = {"decimal_comma": None} if kind != "euro.csv" else {"decimal_comma": True}
        assert predicted(pair, written(frame, tmp_path, kind), said, **options) == first, kind
    assert said == []


@pytest.mark.usefixtures("learnt")
def test_predict_tells_and_refuses_what_differs(pair: Any, tmp_path: Path) -> None:
    frame, said = table().head(8).drop(columns=["at", "note", "tags"]), list[str]()
    predicted(pair, frame.assign(count=900.0), said)
    assert said == ["column count: 8 of 8 numbers are outside of 1 to 7, all that was learnt from: 900 to 900"]
    for name, cell in (("when", 1704585600000), ("when", "07.01.2024"), ("count", "many"), ("member", "yes")):
        with pytest.raises(UserError, match=f"FILE: found {cell} in the column {name}"):
            predicted(pair, frame.assign(**{name: cell}), said)
    with pytest.raises(UserError, match=r"numbers such as 1234\.5 in the column 'count'"):
        predicted(pair, written(frame, tmp_path, "euro.csv"), said)
