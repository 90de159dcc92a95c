"""`make test-changed`: which tests a change can break."""

from support.changed import affected

FILES = {
    "cqwen_dist/a.py": "def f():\n    from cqwen_dist.b import g",
    "cqwen_dist/b.py": "",
    "cqwen_dist/wings.py": 'PLACES = {"verb": "tools.c:g"}',
    "cqwen_dist/tools/c.py": "from . import d\nPAGE = 'x.html.j2'",
    "cqwen_dist/tools/d.py": "",
    "cqwen_dist/__main__.py": "from cqwen_dist.wings import from_wing\nfrom_wing(verb)",
    "tests/conftest.py": "@pytest.fixture\ndef trained():\n    from support.runs import run\n    return run()",
    "tests/support/runs.py": 'def run():\n    return start(["-m", "cqwen_dist"])',
    "tests/test_a.py": "from cqwen_dist.a import f",
    "tests/test_run.py": "def test_it(trained): ...",
    "tests/x/test_page.py": 'text = (ROOT / "docs/data.md").read_text()',
    "tests/x/test_rest.py": "from test_run import y",
    "tests/x/test_none.py": "",
}


def test_a_change_finds_the_tests_that_it_can_break() -> None:
    cases = {
        "cqwen_dist/b.py": ["tests/test_a.py"],
        "cqwen_dist/a.py": ["tests/test_a.py"],
        "cqwen_dist/tools/d.py": [
            "tests/test_run.py",
            "tests/x/test_rest.py",
        ],  # by the command, the wing and a fixture
        "cqwen_dist/tools/x.html.j2": ["tests/test_run.py", "tests/x/test_rest.py"],
        "docs/data.md": ["tests/x/test_page.py"],
        "docs/other.md": [],
        "tests/x/test_none.py": ["tests/x/test_none.py"],
    }
    for path, tests in cases.items():
        assert affected([path], FILES) == tests, path
    everything = sorted(name for name in FILES if "/test_" in name)
    assert affected(["pyproject.toml"], FILES) == affected(["tests/conftest.py"], FILES) == everything
