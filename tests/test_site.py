"""The documentation as a site: built without a warning, every page in its place, every config key on its page."""

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from http.server import HTTPServer
from pathlib import Path

import pytest
from support.exported import tiny_pair, write_folder

from cqwen_dist.config import json_schema
from cqwen_dist.config.key_page import schema_markdown

ROOT = Path(__file__).parents[1]
MADE = {"config.md", "changelog.md"}  # by `make docs`


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert named >= pages | MADE, "a new page belongs into mkdocs.yml, nav"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (the extra `docs`)")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path / "docs" / "changelog.md")
    (tmp_path / "docs" / "config.md").write_text(schema_markdown(json.loads(json_schema())))
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "build" / "site" / "config" / "index.html").read_text()
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
    assert len(schema_markdown(json.loads(json_schema(True)))) < len(page) / 2, "--basic: fewer"
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows), "four columns"


def test_the_tutorials_server_answers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", *tiny_pair())
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.S)
    *definitions, last = snippet.strip().splitlines()
    assert last == 'HTTPServer(("127.0.0.1", 8000), Answers).serve_forever()'
    names: dict[str, object] = {}
    exec("\n".join(definitions).replace("out/patients", str(folder)), names)
    server = HTTPServer(("127.0.0.1", 0), names["Answers"])  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        body = json.dumps({"prompt": "tea costs 3.5 and milk costs", "max_new_tokens": 6}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", body, timeout=60) as answer:
            found = json.load(answer)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert found["prompt"] == "tea costs 3.5 and milk costs"
    assert len(found["tokens"]) == 6 or found["end"] == "eos"


def test_the_readme_links_to_files_that_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists() and Path(link).name not in MADE]
