"""Every evaluation figure against its definition, on the whole [B,T,V] at once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import VOCAB, metrics
from transformers import AutoModelForCausalLM

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.export import load_trained
from cqwen_dist.config import load_config
from cqwen_dist.data.collate import collate
from cqwen_dist.data.dataset import Datasets, load_datasets
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer


@pytest.fixture(scope="module")
def data(one_rank: Path) -> Datasets:
    config = load_config(one_rank / "config.yaml")
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, VOCAB)
    return load_datasets(config.data, tokenizer)


@pytest.fixture(scope="module")
def held_out(data: Datasets) -> Batch:
    dataset = data.eval
    assert dataset is not None
    samples = [dataset[i] for i in range(len(dataset))]
    return collate(samples, pad_token_id=dataset.pad_token_id, num_token_id=dataset.num_token_id)


@torch.no_grad()
def test_the_figures_are_what_their_names_say(one_rank: Path, data: Datasets, held_out: Batch) -> None:
    found = metrics(one_rank)[-1]
    model = load_trained(one_rank)[0].model
    loc_s, scale_s, loc_y, scale_y = model(held_out.input_ids, held_out.numeric_values, held_out.attention_mask)
    keep, labels = held_out.labels >= 0, held_out.labels
    p = (0.5 + torch.atan((loc_s.double() - model.action.threshold.double()) / scale_s.double()) / math.pi)[keep]
    best, is_num = p.argmax(-1), labels[keep] == model.config.num_token_id
    said_num = best == model.config.num_token_id
    target = torch.nn.functional.one_hot(labels[keep], VOCAB).double()
    hits, said, true = (int(x.sum()) for x in (said_num & is_num, said_num, is_num))
    expected = {
        "eval/accuracy": float((best == labels[keep]).double().mean()),
        "eval/cls_loss_mean": float(torch.nn.functional.binary_cross_entropy(p, target, reduction="sum") / len(p)),
        "eval/num_precision": hits / max(said, 1),
        "eval/num_recall": hits / true,
        "eval/num_f1": 2 * hits / (said + true),
        "dist/ovr_prob_sum_median_standard": float(p.sum(-1).quantile(0.5)),
    }
    raw = held_out.numeric_labels[held_out.numeric_mask]
    loc, scale = loc_y[held_out.numeric_mask].double(), scale_y[held_out.numeric_mask].double()
    error = (model.target.inverse(loc) - raw).abs()
    goal = model.target.forward(raw).double()
    expected |= {
        "eval/reg_mae": float(error.mean()),
        "eval/reg_mdae": float(error.quantile(0.5)),
        "eval/reg_nll": float((torch.log(math.pi * scale) + torch.log1p(((goal - loc) / scale) ** 2)).mean()),
        "eval/coverage_90": float(((goal - loc).abs() <= math.tan(0.45 * math.pi) * scale).double().mean()),
        "eval/baseline_mdae": float(np.median(np.abs(raw.numpy() - np.median(data.train.target_values())))),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@torch.no_grad()
def test_base_accuracy_is_the_base_models_own_top_1(one_rank: Path, held_out: Batch) -> None:
    """Values unseen: the base reads <NUM>'s row as any other."""
    base = AutoModelForCausalLM.from_pretrained(one_rank / "base").eval()
    best = base(input_ids=held_out.input_ids, attention_mask=held_out.attention_mask.long()).logits.argmax(-1)
    keep = held_out.labels >= 0
    expected = float((best == held_out.labels)[keep].double().mean())
    assert json.loads((one_rank / "start.json").read_text())["base_accuracy"] == pytest.approx(expected, abs=1e-9)
    assert metrics(one_rank)[-1]["eval/base_accuracy"] == pytest.approx(expected, abs=1e-9)


def test_two_ranks_evaluate_as_one(one_rank: Path, two_ranks: Path) -> None:
    alone, together = metrics(one_rank)[2], metrics(two_ranks)[2]
    names = [name for name in alone if name.startswith(("eval/", "dist/"))]
    assert len(names) > 15
    for name in names:
        drawn = name.endswith("_causal")  # of individuals: each rank draws its own
        assert together[name] == pytest.approx(alone[name], rel=0.1 if drawn else 1e-4, abs=1e-6), name
