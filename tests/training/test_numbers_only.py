"""loss.words none: a run that learns numbers only."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numerics import assert_all_close
from support.runs import losses, metrics, train_run, write_config, write_texts
from support.tiny import tiny_causal_lm
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.prediction.table import predict_numbers
from cqwen_dist.sizes.architecture import Architecture, read_architecture
from cqwen_dist.tools.export.export import export
from cqwen_dist.tools.plan.comm import step_messages
from cqwen_dist.tools.plan.memory import phases
from cqwen_dist.tools.plan.stage_sizes import flops, stage_sizes
from cqwen_dist.tools.report.html import write_report
from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint


def batch_with_numbers() -> Batch:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30, (3, 13), generator=draw)
    is_number = torch.rand(ids.shape, generator=draw) < 0.3
    ids[is_number] = 31
    values = torch.where(is_number, torch.randn(ids.shape, generator=draw).double() * 5, 0.0)
    real = torch.arange(12).expand(3, -1) < torch.tensor([[12], [7], [9]])
    return Batch(
        input_ids=ids[:, :-1],
        numeric_values=values[:, :-1],
        attention_mask=real,
        position_ids=torch.arange(12).expand(3, -1),
        labels=ids[:, 1:].masked_fill(~real, -100),
        numeric_labels=values[:, 1:],
        numeric_mask=is_number[:, 1:] & real,
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}


def test_gradients_are_those_of_the_numbers_alone() -> None:
    """Against the seeds' formula over all positions in float64, and against the whole loss with words weighted by 0."""
    model = tiny_causal_lm(num_token_id=31, target={"name": "standardise", "median": 1.0, "scale": 3.0}).model.double()
    batch = batch_with_numbers()
    count = int(batch.numeric_mask.sum())

    def fused(keep: Tensor, options: LossOptions) -> Tensor:
        u = model.abduction(model.kept_features(batch, keep))
        labels = TokenLabels(batch.labels.flatten()[keep], model.action.number_head.labels(batch, keep))
        return fused_loss(model.action, u, labels, options, 0.0, 1.0 / count).loss

    alone = gradients(model, fused(batch.learnt(words=False), LossOptions(31, words=False)))
    assert {"action.reg_weight", "abduction.loc_net.weight", "features.embedding.w_num"} <= alone.keys()
    assert not [name for name in alone if "action.cls" in name or "threshold" in name]
    *_, loc, scale = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    gap = ((batch.numeric_labels - 1.0) / 3.0 - loc) / scale
    nll = (math.pi * scale).log() + (1 + gap.square()).log()
    assert_all_close(gradients(model, nll[batch.numeric_mask].sum() / count), alone, 1e-5)
    without = gradients(model, fused(batch.kept, LossOptions(31, alpha=1.0, gemm_dtype=torch.float64)))
    assert_all_close({name: without[name] for name in alone}, alone, 1e-9)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, its run folder."""
    folder = tmp_path_factory.mktemp("numbers")
    train_run(write_config(folder, loss__words="none"))
    return folder / "run"


def test_nothing_of_words_is_trained_measured_or_told(alone: Path) -> None:
    start = json.loads((alone / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    names = {name for record in (start, *metrics(alone)) for name in record}
    assert {"train/reg_loss_effective", "eval/reg_mdae", "eval/crps_target"} <= names
    of_words = ("accuracy", "cls", "perplexity", "prob_sum", "num_f1", "p_num", "/ece", "kl")
    assert not [name for name in names if any(part in name for part in of_words)]
    state = load_checkpoint(checkpoint_folder(alone, 6), (0, 2**62))
    assert not state.row_moments
    assert state.head_moments
    assert load_config(alone / "config.yaml").stages[0].groups == {"abduction", "noise", "regression", "embedding"}
    file = alone / "page.html"
    write_report([alone], file)
    page = file.read_text(encoding="utf-8")
    assert "Words" not in page.split('id="diagnosis"')[1].split("</section>")[0]
    assert set(evaluate_checkpoint(alone, None)) == {
        name for name in metrics(alone)[-1] if name[:5] in ("eval/", "dist/")
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.zero_stage=3", "parallel.vocab_group_size=2", "train.micro_batch_size=3"],
        pytest.param(["parallel.sequence_group_size=2", "model.attention=varlen"], marks=pytest.mark.slow),
        pytest.param(["data.pack=true", "parallel.zero_stage=2"], marks=pytest.mark.slow),
    ],
)
def test_every_layout_takes_the_same_steps(alone: Path, tmp_path: Path, overrides: list[str]) -> None:
    train_run(write_config(tmp_path, loss__words="none"), *overrides, world=2)
    if "data.pack=true" in overrides:
        (alone := tmp_path / "one").mkdir()
        train_run(write_config(alone, loss__words="none"), "data.pack=true")
        alone = alone / "run"
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-4)
    last, other = metrics(alone)[-1], metrics(tmp_path / "run")[-1]
    assert other["eval/crps_target"] == pytest.approx(last["eval/crps_target"], rel=1e-3)


def test_cached_features_take_the_same_steps(tmp_path: Path) -> None:
    """The cache has z of all label positions; the loss reads those of numbers."""
    stages = [{"name": "heads", "train": ["heads"], "steps": 6, "lr": 1e-2}]
    found = []
    for mode in ("auto", "never"):
        folder = tmp_path / mode
        folder.mkdir()
        train_run(write_config(folder, loss__words="none", stages=stages, train__feature_cache__mode=mode))
        found.append(losses(folder / "run"))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_model_answers_with_one_number(alone: Path, tmp_path: Path) -> None:
    prompts = ["tea costs", "milk costs 3 and"]
    model, tokenizer = load_trained(alone)
    wanted = [row["predicted"] for row in predict_numbers(model, tokenizer, prompts, within=0, digits=17)]
    exported, own = load_trained(export(alone, tmp_path / "out"))
    for mode in ("standard", "compatible", "individual"):
        written = continue_text(exported, own, prompts, mode=mode, digits=17, seed=0)
        assert [len(each.tokens) for each in written] == [1, 1]
        assert [each.numbers[0].p_num for each in written] == [1.0, 1.0]
        if mode == "standard":
            assert [each.numbers[0].written for each in written] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data__watch": {"plain": "x.jsonl"}}, "data.watch"),
        ({"stages__0__train": ["classifier"]}, "stages.0.train"),
        ({"loss__class_weights": "frequency"}, "loss.class_weights"),
    ],
)
def test_what_only_words_have_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(write_config(tmp_path, loss__words="none", **changes))
    assert refused.value.key == key


def test_texts_without_numbers_are_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", numbers=False)
    with pytest.raises(Exception, match=r"loss.words: found 'none'"):
        train_run(write_config(tmp_path, loss__words="none"))


def test_the_plan_has_nothing_of_words(tmp_path: Path) -> None:
    for words, has in (("none", False), ("ovr", True)):
        config = load_config(write_config(tmp_path, loss__words=words, parallel__vocab_group_size=2))
        sizes = stage_sizes(config, Architecture.of(read_architecture(config)), world=2, kind="cpu")[-1]
        assert (flops(sizes).word_head > 0) is has
        assert any(message.group == "vocabulary" for message in step_messages(sizes)) is has
        assert any(part.name == "loss tiles" for parts in phases(sizes).values() for part in parts) is has
