"""The heads compute in fp32, wherever their weights are.

Scales are of order 1e-3 next to logits near 15, so bf16 would lose them. Two kinds of library change the dtype:

- `.to(dtype)`, `.half()`, Trainer, accelerate: `keeping_fp32` answers that the heads stay as they are.
- DeepSpeed and FSDP replace a parameter's storage without asking, and their optimizers need one dtype for all
  parameters. They keep fp32 masters themselves. So the heads accept any dtype and cast on use (`at_hand`).
  A second set of masters in a buffer would double the memory of W_cls and contradict the optimizer's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import is_accelerate_available

from cqwen_dist.config.errors import UserError

LOW = (torch.bfloat16, torch.float16)


def keeping_fp32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for `nn.Module._apply` that moves as fn does, but never casts below fp32."""

    def kept(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return tensor.to(moved.device) if moved.dtype in LOW and tensor.dtype not in LOW else moved

    return kept


@contextmanager
def made_in_fp32() -> Iterator[None]:
    """Inside, new parameters are fp32 if the default dtype is lower, as in from_config(dtype=bfloat16)."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(default, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, the module's weights are where and how they are used: on the module's device, also those that accelerate
    has offloaded to a disk or the CPU, and in fp32: a lower parameter's cast, with a gradient to the parameter.

    Modules inside it cast by themselves (`HeadLinear`): ZeRO-3's hooks look for the real parameters of what is called.
    """
    with ExitStack() as stack:
        if not torch.compiler.is_compiling():
            if is_accelerate_available():  # otherwise no weight is offloaded
                from accelerate.utils import align_module_device

                for part in module.modules():
                    stack.enter_context(align_module_device(part))
            for name in [name for name, p in module.named_parameters(recurse=False) if p.dtype in LOW]:
                parameter: Any = getattr(module, name)  # ZeRO-3 gathers its partitions here
                stack.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = parameter.float()
        yield


def refuse_changed(heads: Mapping[str, nn.Module]) -> None:
    """Raises `UserError` if another library wrapped a head (adapters, quantisation): the fused loss would bypass it."""
    action = heads["action"]
    if not hasattr(action, "add_noise"):  # PEFT's wrapper of a parameter
        found = f"action.{getattr(action, 'parameter_name', '')}"
        raise UserError("target_parameters", found, "modules_to_save=['action'], which trains it whole")
    for name, head in heads.items():
        compressed = any(hasattr(part, "quantization_scheme") for part in head.modules())  # also in floats
        for own, parameter in head.named_parameters():
            library = type(parameter).__module__.partition(".")[0]
            if compressed or not parameter.is_floating_point() or library in ("bitsandbytes", "torchao", "optimum"):
                skip = ", ".join(f'"model.{each}"' for each in heads)
                allowed = (
                    f"heads in full: write modules_to_not_convert=[{skip}], or llm_int8_skip_modules of bitsandbytes, "
                    f'or ignore=["re:model.({"|".join(heads)}).*"] of compressed-tensors'
                )
                raise UserError("quantization_config", f"model.{name}.{own} of {parameter.dtype}", allowed)
