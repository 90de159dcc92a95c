"""The documentation as a site: built without a warning, every page in its place, every config key on its page."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import conformance
from support import capability_table

from cqwen_dist.config import json_schema
from cqwen_dist.config.keys import schema_markdown

ROOT = Path(__file__).parents[1]
MADE = {"config.md", "capabilities.md", "conformance.md", "changelog.md"}  # by `make docs`


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named >= pages | MADE, "a new page belongs into mkdocs.yml, nav"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("material", reason="mkdocs-material is not installed (the extra `docs`)")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copy(ROOT / "CHANGELOG.md", folder / "docs" / "changelog.md")
    (folder / "docs" / "config.md").write_text(schema_markdown(json.loads(json_schema())))
    (folder / "docs" / "capabilities.md").write_text(capability_table.page())
    (folder / "docs" / "conformance.md").write_text(conformance.page())
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


def test_the_site_builds_without_a_warning(site: Path) -> None:
    page = (site / "config" / "index.html").read_text()
    assert 'id="stages-until"' in page
    assert "&lt;NUM&gt;" in page, "no tag"


def test_the_config_page_has_every_key_with_its_sentence() -> None:
    schema = json.loads(json_schema())
    page = schema_markdown(schema)
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        for name, key in section["properties"].items():
            said = re.split(r"[`|<*\n]", key.get("description", ""))[0]
            assert re.search(rf"^\| \**`{name}`\** \|.*\| {re.escape(said)}", page, re.M), f"{name}: {said}"
    assert "| **`lr`** | number &gt; 0 | `2e-05` |" in page.replace("> 0", "&gt; 0")
    assert len(schema_markdown(json.loads(json_schema(True)))) < len(page), "--basic: fewer"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows), "four columns"


def test_the_readme_links_to_files_that_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists() and Path(link).name not in MADE]
