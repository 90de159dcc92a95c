"""Keys of earlier versions: refused by name in a config, ignored in a saved one where they have their default."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import cqwen_forked, losses, train_run

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.config.messages import REMOVED

TREE: dict[str, Any] = {
    "model": {"name_or_path": "base", "lora": {}},
    "data": {"train": "a.jsonl", "eval": "b.jsonl"},
    "loss": {"constraint": {}},
    "stages": [{"name": "one", "train": ["heads"], "until": {"max_steps": 5}}],
    "parallel": {},
    "train": {"feature_cache": {}},
    "run": {},
}


def with_key(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.replace(".N", ".0").split(".")
    at: Any = tree
    for part in above:
        at = at[int(part)] if part.isdecimal() else at.setdefault(part, {})
    at[last] = value


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_what_is_there_instead(tmp_path: Path, key: str) -> None:
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    path = tmp_path / "c.yaml"
    default, why = REMOVED[key]
    for value, saved in ((default, False), (77, False), (77, True)):
        with_key(tree, key, value)
        path.write_text(yaml.safe_dump(tree))
        with pytest.raises(UserError) as refusal:
            load_config(path, saved=saved)
        assert refusal.value.key == key.replace(".N", ".0")
        assert f"{refusal.value.key}: this key was removed: {why}" in str(refusal.value)
        assert "c.yaml, line " in str(refusal.value)


def test_no_removed_key_is_in_the_schema() -> None:
    known = Config.model_validate(TREE).model_dump()
    known["stages"] = {"N": known["stages"][0]}
    for key in REMOVED:
        at: Any = known
        for part in key.split("."):
            at = (at or {}).get(part, {})
        assert at == {}, key


@pytest.fixture
def old_run(one_rank: Path, tmp_path: Path) -> Path:
    """A run's folder as an earlier version left it in its middle: every removed key is saved, at its default."""
    run = tmp_path / "run"
    shutil.copytree(one_rank, run)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    for key, (value, _) in REMOVED.items():
        if not {"until", "pretrain", "reg_weight"} & set(key.split(".")):  # sections that this run does not have
            with_key(tree, key, value)
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    return run


def test_an_old_run_is_resumed_evaluated_and_exported(one_rank: Path, old_run: Path, tmp_path: Path) -> None:
    for newer in sorted((old_run / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(newer)
    (first,) = (old_run / "checkpoints").glob("step-*")
    (old_run / "latest").write_text(f"checkpoints/{first.name}\n")
    train_run(one_rank.parent / "config.yaml", f"run.dir={old_run}")
    assert losses(old_run) == losses(one_rank)
    load_trained(old_run)
    done = cqwen_forked("eval", old_run)
    assert done.returncode == 0, done.stderr
