"""Module 2: z is the base's last hidden state (S0 2), bit for bit where there are no numbers."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import random_batch, random_ids, tiny_base
from torch import nn

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.model.backbone import FeatureExtractionNetwork
from cqwen_dist.model.base_loading import base_config, build_base, load_base
from cqwen_dist.model.embedding import NumericalAwareEmbedding, phi
from cqwen_dist.sizes.architecture import read_architecture

BASES = [("qwen2", True), *((kind, False) for kind in ARCHITECTURES)]


@pytest.mark.parametrize(("kind", "tied"), BASES)
@torch.no_grad()
def test_features_are_the_base_last_hidden_state(kind: str, tied: bool) -> None:
    base = tiny_base(kind, tied=tied)
    ids = random_ids(3, 10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :4] = False
    expected = base.model(input_ids=ids, attention_mask=mask).last_hidden_state
    alone = base.model(input_ids=ids).last_hidden_state
    model = CausalQwenModel.from_base_model(copy.deepcopy(base), start="seed", num_token_id=90).eval()
    zeros = torch.zeros(ids.shape, dtype=torch.float64)
    assert torch.equal(model.features(ids, zeros, mask), expected)
    assert torch.equal(model.features(ids, zeros), alone)
    seeds = FeatureExtractionNetwork(base)  # S2 3.2: of the whole causal model, as a seeds' reader has it
    assert torch.equal(seeds(base.get_input_embeddings()(ids), mask), expected)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_features_of_a_training_batch_need_no_mask(kind: str) -> None:
    """Right padding is never attended to: kept positions are as with the attention mask."""
    model = CausalQwenModel.from_base_model(tiny_base(kind), start="seed", num_token_id=90).eval()
    batch = random_batch()
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    masked = model.features(batch.input_ids, batch.numeric_values, batch.attention_mask, keep=keep)
    assert_close(model.kept_features(batch, keep), masked, 1e-5, "z")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mixtral", "its experts are stored in another way"),
        ("gemma2", "it scales embeddings"),
        ("gpt2", "it learns positions"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(tmp_path, kind: str, why: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    *names, last = ARCHITECTURES
    allowed = f"{', '.join(names)} or {last}"
    with pytest.raises(UserError, match=rf"model_type: found '{kind}', allowed: {allowed} \({why}.*docs/bases\.md\)"):
        load_base(str(tmp_path), torch.float32)


def test_loading_errors_name_the_cause(tmp_path) -> None:
    with pytest.raises(UserError, match=r"model\.name_or_path.*config\.json"):
        load_base(str(tmp_path), torch.float32)
    with pytest.raises(UserError, match=r"found 'bases/of_a_run', .*folder, as seen from the current one, or a hub"):
        load_base("bases/of_a_run", torch.float32)
    with pytest.raises(UserError, match=r"model\.architecture\.hidden_sise"):
        build_base({"model_type": "qwen2", "hidden_sise": 8}, 0)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_are_rounded_already_are_refused(tmp_path: Path, nested: bool) -> None:
    """As in Qwen3.5's FP8 folders: ZeRO-3, and transformers for the text part alone, would leave out their scales."""
    found: dict[str, Any] = tiny_base("qwen3_5_text").config.to_dict()
    found = {"model_type": "qwen3_5", "text_config": found} if nested else found
    rounded = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(found | rounded))
    config = Config.model_validate({"model": {"name_or_path": str(tmp_path)}, "data": {"train": "x"}})
    for load in (lambda: base_config(str(tmp_path)), lambda: read_architecture(config)):
        with pytest.raises(UserError, match=r"quantization_config: .*fp8.*allowed: none: a full base \(model"):
            load()


H, V, NUM = 16, 40, 37


@pytest.fixture
def embedding() -> NumericalAwareEmbedding:
    torch.manual_seed(0)
    return NumericalAwareEmbedding(nn.Embedding(V, H), H, NUM)


def test_phi_is_the_signed_logarithm() -> None:
    values = torch.tensor([-1e300, -12.5, -1e-9, 0.0, 1e-9, 99.9, 2.0**53 + 1, 1e300], dtype=torch.float64)
    expected = [math.copysign(math.log1p(abs(v)), v) for v in values.tolist()]
    assert_close(phi(values), torch.tensor(expected, dtype=torch.float64), 1e-7, "phi")
    assert phi(torch.tensor([0.0, -0.0])).tolist() == [0.0, 0.0]
    assert phi(torch.tensor([1.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_text_tokens_get_exactly_the_token_embedding(embedding: NumericalAwareEmbedding) -> None:
    ids = torch.tensor([[1, 2, NUM, 4]])
    values = torch.tensor([[0.0, 0.0, 99.9, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        embedding.num_row.normal_()
        e = embedding(ids, values)
    plain = embedding.token_embedding.weight[ids]
    assert torch.equal(e[:, [0, 1, 3]], plain[:, [0, 1, 3]])
    expected = plain[:, 2] + math.log(100.9) * embedding.w_num + embedding.num_row
    assert_close(e[:, 2], expected, 1e-6, "<NUM>")


def test_a_number_anywhere_is_added_without_a_branch(embedding: NumericalAwareEmbedding) -> None:
    """S0 1.3 knows no condition on the id: a value at a word's position counts too."""
    e = embedding(torch.tensor([[5]]), torch.tensor([[-3.0]]))
    assert_close(e[0, 0], embedding.token_embedding.weight[5] - math.log(4.0) * embedding.w_num, 1e-6)


def test_a_bf16_table_gives_bf16_and_exact_text_rows() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(V, H, dtype=torch.bfloat16)
    embedding = NumericalAwareEmbedding(table, H, NUM)
    ids = torch.arange(V).unsqueeze(0)
    e = embedding(ids, torch.zeros(ids.shape, dtype=torch.float64))
    assert e.dtype == torch.bfloat16
    assert torch.equal(e[0], table.weight)


def test_w_num_starts_with_norm_one_and_zero_gives_the_base() -> None:
    torch.manual_seed(0)
    wide = NumericalAwareEmbedding(nn.Embedding(2, 4096), 4096, 1)
    assert wide.w_num.norm().item() == pytest.approx(1.0, abs=0.05)
    none = NumericalAwareEmbedding(nn.Embedding(V, H), H, NUM)
    none.w_num.data.zero_()
    ids, values = torch.tensor([[NUM]]), torch.tensor([[42.0]])
    e = none(ids, values)
    assert torch.equal(e, none.token_embedding(ids))
    e.sum().backward()
    assert_close(none.w_num.grad, torch.full((H,), math.log(43.0)), 1e-6, "gradient of w_num at 0")


def test_gradients_reach_w_num_at_numbers_and_num_row_at_num(embedding: NumericalAwareEmbedding) -> None:
    ids = torch.tensor([[1, NUM, NUM]])
    values = torch.tensor([[0.0, 9.0, -9.0]])
    upstream = torch.randn(1, 3, H)
    embedding(ids, values).backward(upstream)
    assert_close(embedding.w_num.grad, math.log(10.0) * (upstream[0, 1] - upstream[0, 2]), 1e-5, "w_num")
    assert_close(embedding.num_row.grad, upstream[0, 1] + upstream[0, 2], 1e-5, "num_row")
