"""Layers that are compiled compute what they computed, adapters on and off, with every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny import random_batch, tiny_model
from torch._dynamo.utils import counters

from cqwen_dist.config import Config, LoraConfig
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.layers import compile_layers, fuse_adapters
from cqwen_dist.model.lora import adapters_disabled, is_lora


def model() -> CausalQwenModel:
    found = tiny_model(lora=LoraConfig(r=2).model_dump())
    torch.manual_seed(3)
    for name, parameter in found.named_parameters():
        if is_lora(name):
            torch.nn.init.normal_(parameter, std=0.1)
    return found


def features(found: CausalQwenModel) -> torch.Tensor:
    batch = random_batch()
    return found.kept_features(batch, batch.label_mask.flatten().nonzero()[:, 0])


def test_compiled_layers_have_the_same_features_and_gradients():
    plain, compiled = model(), model()
    compile_layers(compiled.transformer, backend="eager")
    found = {}
    for name, one in (("plain", plain), ("compiled", compiled)):
        z = features(one)
        z.square().mean().backward()
        gradients = {n: p.grad for n, p in one.named_parameters() if is_lora(n)}
        with torch.no_grad(), adapters_disabled(one.transformer):
            found[name] = (z.detach(), gradients, features(one))
    z, gradients, base = found["plain"]
    again, others, base_again = found["compiled"]
    torch.testing.assert_close(again, z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(base_again, base, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(base, z, atol=1e-3), "the adapters must matter for this to say anything"
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-7)


def kinds_compiled(layers: int) -> tuple[list[int], int]:
    """(graphs after each of what a run asks of its layers, frames that dynamo gave up)."""
    torch._dynamo.reset()
    counters.clear()
    found = tiny_model(base={"num_hidden_layers": layers}, lora=LoraConfig(r=2).model_dump())
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(is_lora(name))
    fuse_adapters(found.transformer)
    compile_layers(found.transformer, backend="eager")
    graphs = []
    for _ in range(2):
        for rows, length in ((4, 12), (2, 12), (4, 16), (3, 24)):
            batch = random_batch(rows, length)
            found.kept_features(batch, batch.kept).square().mean().backward()
            with torch.no_grad():  # an evaluation; the start's features, which are compared with
                found.kept_features(batch, batch.kept)
                with adapters_disabled(found.transformer):
                    found.kept_features(batch, batch.kept)
            packed = replace(batch, position_ids=batch.position_ids % 8)
            found.kept_features(packed, batch.kept).square().mean().backward()
            graphs.append(counters["stats"]["unique_graphs"])
    frames = counters["frames"]
    return graphs, frames["total"] - frames["ok"]


@pytest.mark.slow
def test_layers_share_compiled_code_and_stay_compiled():
    """More than dynamo's limit of 8: from there on it would run the layers uncompiled, with a warning alone."""
    few, given_up = kinds_compiled(2)
    assert given_up == 0
    assert few[-1] > 8, "fewer kinds than the limit: nothing is tested"
    assert few[2:] == [few[2]] * 6, "a further shape is compiled again"
    many, given_up = kinds_compiled(5)
    assert given_up == 0
    assert many == few, "layers are compiled one by one"


def test_layers_that_zero_3_gathers_are_not_compiled():
    document = {
        "model": {"name_or_path": "unused", "compile_layers": True},
        "data": {"train": "unused"},
        "parallel": {"zero_stage": 3},
    }
    with pytest.raises(ValueError, match=r"false under parallel\.zero_stage 3"):
        Config.model_validate(document)
