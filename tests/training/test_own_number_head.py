"""A number head of the user's own, named in the config: it trains, decides, is measured and exported."""

import json
import random
from pathlib import Path

import pytest
import torch
from support import custom_parts
from support.runs import losses, metrics, train_run, write_config
from support.tiny import tiny_model

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError
from cqwen_dist.tools.export.export import export

TRUST = "CQWEN_TRUST_REMOTE_CODE"
HEAD = "support.custom_parts:WholeNumbers"


def write_boxes(path: Path, count: int = 80) -> Path:
    """Boxes are counted, tea is weighed."""
    draw = random.Random(0)
    texts = [f"we have {draw.randint(3, 60)} boxes of tea, {draw.uniform(3, 60):.2f} kilos" for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_custom_number_head_trains_decides_is_measured_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(
        tmp_path,
        model__number_head=HEAD,
        data__train=str(write_boxes(tmp_path / "boxes.jsonl")),
        parallel__vocab_group_size=2,
        stages__0__steps=20,
        stages__0__lr=3e-2,
        train__checkpoint_every=100,
    )
    train_run(config, "run.stop_after=heads", world=2)
    train_run(config, world=2)  # from the checkpoint of the first stage
    run = tmp_path / "run"
    assert sum(losses(run)[-5:]) < 0.9 * sum(losses(run)[:5])
    evaluated = [record for record in metrics(run) if "eval/accuracy" in record]
    assert evaluated[-1]["eval/whole_accuracy"] > 0.9
    assert load_checkpoint(checkpoint_folder(run, 23), (0, 2**62)).heads["action.whole_weight"].any()

    monkeypatch.delenv(TRUST, raising=False)
    with pytest.raises(UserError, match=f"model.number_head: found '{HEAD}', allowed: {TRUST}=1"):
        load_trained(run)
    monkeypatch.setenv(TRUST, "1")
    model, tokenizer = load_trained(export(run, tmp_path / "out", True))
    assert isinstance(model.model.action.number_head, custom_parts.WholeNumbers)
    with torch.no_grad():
        model.model.action.threshold[tokenizer.num_token_id] = -1e4  # a number comes at once
    for prompt, whole in (("we have ", True), ("we have 12 boxes of tea, ", False)):
        ids, values = tokenizer.encode(prompt)
        given = torch.tensor([ids]), torch.tensor([values], dtype=torch.float64)
        _, numbers = model.generate(*given, max_new_tokens=1, return_numbers=True, digits=4)
        (number,) = numbers.records(0, digits=4)
        assert (number.written == round(number.written)) == (number.source is not None) == whole


def test_a_number_head_that_does_not_fit_is_refused() -> None:
    for shape, said in (
        ({"number_head": "support.nowhere:Head"}, "number_head: found support.nowhere:Head: ModuleNotFoundError"),
        ({"number_head": "support.custom_parts:HalfGate"}, r"HalfGate: TypeError: HalfGate\(\) takes no arguments"),
        ({"number_head": HEAD, "number_types": 2}, "number_head and number_types: .*one of them"),
    ):
        with pytest.raises(UserError, match=said):
            tiny_model(**shape)
