"""Training setup of the base's layers: gradient checkpointing, fused adapters, attention, compilation.

A linear map with an adapter only needs matrix products: y = x W^T + b + s (dropout(x) A^T) B^T. PEFT's module uses
separate kernels to multiply by s and to add, with more of them in backward. Here both are part of a product (`addmm`):
3 kernels forward and 5 backward instead of 5 and 7, for seven maps per layer. There is no rounding to bf16 between
product and sum.

    forward    h = s x A^T         y = x W^T + b,  y += h B^T
    backward   e = g B             dB = g^T h      dA = s e^T x      dx = g W,  dx += s e A
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.schema import Config
from cqwen_dist.model.lora import ADAPTER
from cqwen_dist.model.varlen import attend_within_texts


def run_layers_as(transformer: Any, config: Config) -> None:
    """Set up the layers of a transformer for training, in place. Names of modules and parameters do not change."""
    base = architecture(transformer.config.model_type)
    if config.model.gradient_checkpointing:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    if base.capabilities.fused_adapters.level != "unsupported":
        fuse_adapters(transformer)
    if config.attention == "varlen":
        attend_within_texts(transformer)
    if config.model.compile_layers:
        compile_layers(transformer.layers)


def compile_layers(layers: nn.Module, **options: Any) -> None:
    """Compile each layer of a transformer in place; options: those of torch.compile.

    The layers share their code, so it is compiled once per variant: with or without gradients, adapters and mask, and
    at first for new shapes. Wrappers of DeepSpeed and PEFT around the layers are not affected.
    """
    # With the default limit of 8 variants, dynamo would give up and run the layers uncompiled
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in layers.children():
        layer.compile(**options)


def fuse_adapters(transformer: nn.Module) -> None:
    """Use fused products for plain adapters on plain linear maps, in place. DoRA and rounded maps keep PEFT's code.

    Modules, parameters and names do not change. Compiled layers use PEFT's formula, which the compiler fuses anyway.
    """
    for module in transformer.modules():
        if type(module) is PeftLinear and type(module.get_base_layer()) is nn.Linear and not module.lora_variant:
            module.__class__ = FusedLinear


class FusedLinear(PeftLinear):
    """PEFT's linear map with one plain adapter on a frozen base. All other cases are left to PEFT."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out]."""
        if args or kwargs or torch.compiler.is_compiling() or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        a, b, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        # By ZeRO-3, whose hooks gather a module's weights when it is called
        partitioned = hasattr(base.weight, "ds_id")
        if partitioned or base.weight.requires_grad or not x.dtype == a.dtype == base.weight.dtype:
            return super().forward(x)
        seen = self.lora_dropout[ADAPTER](x)
        return _AdaptedProduct.apply(x, None if seen is x else seen, base.weight, base.bias, a, b, scale)


class _AdaptedProduct(torch.autograd.Function):
    """x [..., in]; seen [..., in]: x after dropout, None without dropout; W [out, in], A [r, in], B [out, r]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seen: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        rows = (x if seen is None else seen).flatten(0, -2)
        h = _scaled(rows, a.T, scale)
        y = F.linear(x, weight, bias)
        y.view(-1, y.shape[-1]).addmm_(h, b.T)
        ctx.save_for_backward(rows, h, weight, a, b)
        ctx.scale, ctx.dropped, ctx.shape = scale, seen is not None, x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, h, weight, a, b = ctx.saved_tensors
        need_x, need_seen, *_, need_a, need_b, _ = ctx.needs_input_grad
        g = upstream.flatten(0, -2)
        e = g @ b
        d_x = g @ weight if need_x else None
        d_seen = None
        if ctx.dropped and need_seen:
            d_seen = _scaled(e, a, ctx.scale).view(ctx.shape)
        elif d_x is not None and not ctx.dropped:
            d_x.addmm_(e, a, alpha=ctx.scale)
        d_a = _scaled(e.T, rows, ctx.scale) if need_a else None
        d_b = g.T @ h if need_b else None
        return None if d_x is None else d_x.view(ctx.shape), d_seen, None, None, d_a, d_b, None


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * (left @ right) in one kernel."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)
