"""Module 1: e = embed(x) + phi(v) w_num (seed S0 1.3)."""

import math

import pytest
import torch
from support.numerics import assert_close
from torch import nn

from cqwen_dist.model.embedding import NumericalAwareEmbedding, phi, value_features

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
    none = NumericalAwareEmbedding(nn.Embedding(V, H), H, NUM, w_num_scale=0.0)
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


def test_value_periods_distinguish_digits_and_are_zero_at_zero() -> None:
    periods, values = [10.0, 100.0, 1e6], [0.0, -0.0, 7.0, 123456.0, -2.5]
    features = torch.stack(value_features(torch.tensor(values, dtype=torch.float64), periods), -1)
    assert features.dtype == torch.float32
    assert features[:2].eq(0).all()
    for value, row in zip(values, features.tolist(), strict=True):
        turns = [f(2 * math.pi * value / p) for p in periods for f in (lambda x: math.cos(x) - 1, math.sin)]
        assert row == pytest.approx([math.copysign(math.log1p(abs(value)), value), *turns], abs=1e-6)
