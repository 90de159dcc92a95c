"""experiments.claims: its measures by hand, its scores against the model's own, every experiment on a tiny base."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import write_texts
from support.tiny import tiny_base, tiny_model

from cqwen_dist.data.tokenizer import train_tokenizer
from experiments.claims import individuals, run
from experiments.claims.lists import PROMPTS
from experiments.claims.measures import Claim, auroc, calibration_error, rank_correlation, rejection_curve
from experiments.claims.page import OTHER, PAGE, committed, filled
from experiments.claims.scores import scored
from experiments.claims.subject import Positions
from experiments.claims.texts import SIZES, Sizes

TOY = Sizes(
    10,
    8,
    3,
    calibration=128,
    steps=3,
    step_tokens=16,
    grid_steps=2,
    individuals=4,
    prompts=3,
    words=4,
    lora_heads=1,
    lora_steps=1,
    lora_texts=2,
    people=30,
    asked=4,
    minutes=0.1,
)


def positions(count: int = 40, seed: int = 0) -> Positions:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 91, (count,), generator=g)
    labels[::4] = 90  # <NUM>
    values = torch.where(labels == 90, torch.randn(count, generator=g, dtype=torch.float64), 0.0)
    return Positions(torch.randn(count, 24, generator=g), labels, values, labels == 90, torch.arange(count) // 10)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(folder of a tiny base whose tokenizer never saw <NUM>, a file of texts with numbers)"""
    folder = tmp_path_factory.mktemp("base")
    data = write_texts(folder / "texts.jsonl", 90)
    lists = [f"{prompt} {words}" for prompt, words in PROMPTS.items()]
    trained = train_tokenizer([*data.read_text().splitlines(), *individuals.PROMPTS, *lists * 3], 900)
    trained.save_pretrained(folder)
    tiny_base(vocab_size=len(trained), max_position_embeddings=640).save_pretrained(folder)
    return str(folder), str(data)


def test_auroc_calibration_and_correlation_equal_values_by_hand() -> None:
    wanted = np.array([True, False, True, False])
    assert auroc(np.array([3.0, 1.0, 2.0, 0.0]), wanted) == 1.0
    assert auroc(np.array([0.0, 3.0, 1.0, 2.0]), wanted) == 0.0
    assert auroc(np.ones(4), wanted) == 0.5, "equal scores say nothing"
    assert math.isnan(auroc(np.ones(2), np.array([True, True])))
    p, right = np.array([0.9] * 10 + [0.2] * 10), np.array([True] * 10 + [False] * 10)
    assert calibration_error(p, right, bins=2) == pytest.approx((0.1 + 0.2) / 2)
    assert rank_correlation(np.full(5, 2.0), np.arange(5.0)) == 0.0
    assert rank_correlation(np.arange(5.0), np.arange(5.0) ** 3) == pytest.approx(1.0)
    curve = rejection_curve(np.array([0.1, 0.2, 0.8, 0.9]), np.array([True, True, False, False]))
    assert curve[-1] == (1.0, 0.5)
    assert dict(curve)[0.5] == 1.0


def test_a_claim_holds_only_if_the_whole_interval_does() -> None:
    def verdict(values: list[float], bar: float = 0.5) -> str:
        return Claim("c", "m", bar, values).judged()["verdict"]

    assert verdict([0.8, 0.81, 0.79]) == "holds"
    assert verdict([0.2, 0.21, 0.19]) == "does not hold"
    assert verdict([0.3, 0.9, 0.6]) == "undecided"
    assert verdict([0.9]) == "undecided", "one seed decides nothing"
    assert verdict([0.5, 0.5, 0.5]) == "does not hold", "a score that is always chance is no sign"
    assert verdict([math.nan, 0.9, 0.9]) == "undecided"


def test_scores_equal_the_models() -> None:
    model = tiny_model(number_dims=2)
    torch.nn.init.normal_(model.abduction.scale_net.weight, std=0.3)
    seen = positions(150)
    found = scored(model, seen)
    u = model.abduction(seen.z)
    loc, scale, loc_y, scale_y = (x.double() for x in model.action(*u))
    used = int(model.config.used_rows)
    loc, scale = loc[:, :used], scale[:, :used]
    p = 0.5 + torch.atan((loc - model.action.threshold[:used]) / scale) / math.pi
    soft = loc.softmax(1)
    rows = torch.arange(150)
    expected = {
        "p": p.max(1).values,
        "p_sum": p.sum(1),
        "p_sq": p.square().sum(1),
        "p_label": p[rows, seen.labels],
        "scale": scale[rows, p.argmax(1)],
        "soft_p": soft.max(1).values,
        "soft_entropy": -(soft * soft.log()).sum(1),
        "soft_label": soft[rows, seen.labels],
        "y_loc": loc_y,
        "y_scale": scale_y,
    }
    for name, column in expected.items():
        assert found[name] == pytest.approx(column.detach().numpy(), rel=1e-3, abs=1e-5), name
    assert found["bins softmax"][2].sum() <= 150
    assert found["bins ovr"][1].sum() <= found["p_sum"].sum() * (1 + 1e-6)


@pytest.mark.slow
def test_experiment_runs_on_tiny_base(tmp_path: Path, base: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "toy", TOY)
    monkeypatch.setattr(individuals, "PILOT_WORDS", 2)
    said: list[str] = []
    costly = ["stages", "forgetting", "treatments"]  # they train with LoRA, or fit a table
    found = run.run(costly, *base, tmp_path / "1", scale="toy", seeds=1)
    found |= run.run([n for n in run.NAMES if n not in costly], *base, tmp_path / "2", scale="toy", seeds=2)
    assert set(found) == set(run.NAMES)
    for name, result in found.items():
        seeds = 1 if name in costly else 2
        assert result == json.loads((tmp_path / str(seeds) / f"{name}.json").read_text())
        assert {claim["verdict"] for claim in result["claims"]} <= {"holds", "does not hold", "undecided"}
        assert all(len(claim["values"]) == seeds for claim in result["claims"])
        for picture, drawing in result["pictures"].items():
            assert drawing.startswith("<svg"), picture
            assert len(drawing) < 60_000
    start = found["uncertainty"]["details"]["errors"]["start"]
    assert {seed["mean scale_U"] for seed in start} <= {0.5, None}, "None where no word is right"
    page = filled("".join(f"<!-- {name} -->\nFORMER\n<!-- end -->\n" for name in found), found)
    assert "FORMER" not in page
    assert page.count("**") >= 2 * sum(len(result["claims"]) for result in found.values())
    assert filled(page, found) == page
    again = run.run(["one_vs_rest"], *base, tmp_path / "2", scale="toy", seeds=2, say=said.append)
    assert again["one_vs_rest"]["claims"] == found["one_vs_rest"]["claims"]
    assert not [line for line in said if line.startswith("seed")], "what was measured is not measured again"


def test_experiments_md_shows_the_stored_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, committed(), committed(OTHER)) == page, "run `python -m experiments --page`"
    for name, result in committed().items():
        for picture in result["pictures"]:
            assert (PAGE.parent / "experiments" / f"{name}-{picture}.svg").stat().st_size < 60_000
