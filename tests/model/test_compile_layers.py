"""Layers that are compiled compute what they computed, adapters on and off, with every gradient."""

from __future__ import annotations

import torch
from support.tiny import random_batch, tiny_model

from cqwen_dist.config import LoraConfig
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.layers import compile_layers
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
