"""A frozen base in 4 bits (QLoRA): bitsandbytes' NF4 through transformers. GPU only; not yet measured on one.

The backbone's linear maps hold 4 bits a weight and are multiplied in bf16. Adapters, w_num, the heads and the output
head that W_cls is copied from are not quantized. z is the quantized base's from the first step on, in calibration and
in `eval/base_accuracy` too.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said


def quantized_loading(kind: str, device: torch.device) -> dict[str, Any]:
    """Keywords for `from_pretrained`; none for "none". Raises `UserError` without a GPU or without bitsandbytes."""
    if kind == "none":
        return {}
    if device.type != "cuda":
        raise UserError("model.quantize", kind, "none on a CPU: bitsandbytes' 4-bit kernels need a GPU")
    if find_spec("bitsandbytes") is None:
        raise UserError("model.quantize", Said(f"{kind} without bitsandbytes"), "none, or pip install bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.uint8,
    )
    return {"quantization_config": config, "device_map": {"": device}}
