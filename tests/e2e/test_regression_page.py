"""docs/regression.md: its config and each of its commands, on a tiny base."""

import csv
import json
import random
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ranks import run_ranks
from support.runs import as_rank, train_run
from support.serving import running

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import load_config

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "regression.md").read_text(encoding="utf-8")
(CONFIG,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
_REST = PAGE.replace(f"```yaml\n{CONFIG}```", "")
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", _REST, re.DOTALL) for line in block.splitlines()]


def test_the_page_has_four_answers() -> None:
    assert [line.split()[1] if line.startswith("cqwen") else line.split()[0] for line in COMMANDS] == [
        *("launch", "predict", "launch", "predict", "predict", "serve", "curl", "python")
    ]


@pytest.fixture(scope="module")
def folder(one_rank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, on the base that a run has built; its texts are short, as this base's context is."""
    own, draw = tmp_path_factory.mktemp("flats"), random.Random(0)
    rows = [
        {"text": f"{draw.choice(['tea', 'milk'])} and rice.", "rent": 300 + 10 * i, "size": 20 + i} for i in range(40)
    ]
    (own / "flats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (own / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    config = CONFIG.replace("bases/smollm2-135m", str(one_rank / "base")).replace("256", "48")
    (own / "flats.yaml").write_text(config)
    return own


def launched(line: str) -> None:
    """`cqwen launch` of the page, on forks in place of the launcher's processes."""
    words = shlex.split(line)[2:]
    at = words.index("--ranks")
    train_run(Path(words[0]), *words[1:at], world=int(words[at + 1]))


def test_the_commands_train_and_predict(folder, cqwen, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    for line in COMMANDS[:5]:
        if line.startswith("cqwen launch"):
            launched(line)
            continue
        done = cqwen(*shlex.split(line)[1:])
        assert done.returncode == 0, done.stderr
    assert load_config("runs/flats").parallel.zero_stage == 3
    for name in ("predicted.csv", "rents.csv", "sizes.csv"):
        found = list(csv.DictReader((folder / name).read_text().splitlines()))
        assert len(found) == 3
        assert all(float(row["low_90"]) < float(row["predicted"]) < float(row["high_90"]) for row in found)
    sizes, rents = (
        [float(row["predicted"]) for row in csv.DictReader((folder / name).read_text().splitlines())]
        for name in ("sizes.csv", "rents.csv")
    )
    assert sizes != rents, "the second target has a law of its own"

    pytest.importorskip("fastapi", reason="pip install 'cqwen-dist[serve]'")
    from cqwen_dist.tools.serve.server import Limits, Server

    with running(Server(*load_trained("runs/flats"), "flats", Limits())) as url:
        words = shlex.split(COMMANDS[6])
        body, kind = words[words.index("-d") + 1], words[words.index("-H") + 1].split(": ")
        request = urllib.request.Request(f"{url}/completions", body.encode(), dict([kind]))
        (number,) = json.load(urllib.request.urlopen(request))["choices"][0]["numbers"]
    low, high = number["intervals"]["0.9"]
    assert low < number["value"] < high


def timed(config: str) -> Any:
    from benchmarks.step import run
    from cqwen_dist.sizes.architecture import read_architecture
    from cqwen_dist.tools.plan.cost import MACHINES

    checked = load_config(config)
    return run(checked, read_architecture(checked), as_rank(), MACHINES["cpu"], 1e11, rounds=1)


def test_the_step_is_timed_in_turns(folder: Path) -> None:
    """`python -m benchmarks step flats.yaml`."""
    assert shlex.split(COMMANDS[7])[:4] == ["python", "-m", "benchmarks", "step"]
    small = ["train.global_batch_size=2", "train.micro_batch_size=2", "data.sequence_length=16"]
    (folder / "small.yaml").write_text(yaml.safe_dump(load_config(folder / "flats.yaml", small).model_dump()))
    (found,) = run_ranks(timed, 1, str(folder / "small.yaml"))
    turns = [row for row in found["rows"] if row["name"].startswith("in turns")]
    assert [row["name"].partition(": ")[2] for row in turns] == ["numbers only", "with words", "hf+peft, scalar head"]
    assert all(row["ratio"]["measured"] > 0 for row in turns[1:])
