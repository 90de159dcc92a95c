"""data.watch: what a run does to texts that it is not trained on."""

import json
from pathlib import Path

import pytest
from support.runs import cqwen_forked, losses, metrics, set_back, train_run, write_config, write_texts

FIGURES = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


def watching(folder: Path) -> tuple[Path, Path]:
    """A config whose watched texts are its held-out ones under another name and others without numbers."""
    held_out = write_texts(folder / "held.jsonl", 12)
    texts = [json.loads(line)["text"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    same = folder / "same.jsonl"
    same.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    (folder / "plain.txt").write_text("we have tea\nwe have bread and tea\n", encoding="utf-8")
    watch = {"same": str(same), "plain": str(folder / "plain.txt")}
    config = write_config(
        folder, data__eval=str(held_out), data__eval_fraction=0.0, data__watch=watch, train__eval_every=2
    )
    return config, folder / "run"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of such a config."""
    config, run = watching(tmp_path_factory.mktemp("watched"))
    train_run(config)
    return run


def evaluations(run: Path) -> list[dict[str, float]]:
    start = json.loads((run / "start.json").read_text(encoding="utf-8"))["eval"]
    return [start, *(record for record in metrics(run) if "eval/accuracy" in record)]


def test_watched_texts_have_their_own_metrics_at_every_evaluation(watched: Path, tmp_path: Path) -> None:
    found = evaluations(watched)
    assert len(found) >= 4
    for figures in found:
        for name in FIGURES:
            assert figures[f"watch/same/{name}"] == figures[f"eval/{name}"]
        assert 0 <= figures["watch/plain/accuracy"] <= 1
    assert found[0]["watch/plain/cls_loss_mean"] != found[-1]["watch/plain/cls_loss_mean"]
    train_run(watched.parent / "config.yaml", "data.watch={}", f"run.dir={tmp_path}/unwatched")
    assert losses(watched) == losses(tmp_path / "unwatched"), "looking changes nothing"


def test_stages_and_the_best_checkpoint_may_use_watched_metrics(tmp_path: Path) -> None:
    config, run = watching(tmp_path)
    until = {"metric": "watch/plain/base_accuracy", "patience": 1, "max_steps": 12}
    train_run(
        config,
        f"stages.0.until={json.dumps(until)}",
        "stages.0.steps=null",
        "train.best_metric=watch/plain/cls_loss_mean",
    )
    lengths = [record["stage"] for record in metrics(run)].count("heads")
    assert lengths < 12, "the base's accuracy does not change, so the stage ends early"
    other = (f"run.dir={tmp_path}/other", "train.best_metric=watch/tea/accuracy")
    done = cqwen_forked("train", config, *other)
    assert done.returncode == 2
    assert "train.best_metric: found 'watch/tea/accuracy'" in done.stderr
    assert "watch/plain/accuracy" in done.stderr


def test_a_run_resumed_on_two_ranks_keeps_the_bases_metrics(watched: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(set_back(watched, run, 4), f"run.dir={run}", world=2)
    first, *_, last = evaluations(run)
    for name in ("same", "plain"):
        assert last[f"watch/{name}/base_accuracy"] == first[f"watch/{name}/base_accuracy"]
    assert last["watch/same/accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-9)
