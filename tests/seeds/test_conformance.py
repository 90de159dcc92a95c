"""Every requirement of the seeds has a test that exists or a decision that is written down."""

from seeds.conformance import decisions_there, known_tests, lives_at, page, rows


def test_every_row_is_there_and_is_tested_or_decided():
    assert list(rows()) == list(range(1, 146))
    assert [n for n, row in rows().items() if not row.get("tests") and not row.get("decisions")] == []


def test_files_and_tests_named_by_rows_exist():
    there, decided = known_tests(), decisions_there()
    lost = {
        n: [t for t in row.get("tests", []) if t not in there]
        + [d for d in row.get("decisions", []) if d not in decided]
        + [place for place in row["lives"] if not lives_at(place).exists()]
        for n, row in rows().items()
    }
    assert {n: names for n, names in lost.items() if names} == {}


def test_every_decision_belongs_to_a_row():
    """A decision that no requirement needs belongs in docs/measurements.md or docs/did-not-work.md."""
    used = {d for row in rows().values() for d in row.get("decisions", [])}
    assert set(decisions_there()) - used == set()


def test_the_page_has_every_row():
    assert [int(line.split()[1]) for line in page().splitlines() if line[2:3].isdigit()] == list(rows())
