"""Trains the same backbone with Hugging Face + PEFT: a trained softmax head, cross entropy, torch's fused AdamW.

If the config learns numbers only, the head is transformers' scalar one, with a squared error at each row's end. With
`liger`, Liger-Kernel provides the norms, rotation, activation and linear cross entropy. Adapters and head use the
precision of the backbone, like our matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from cqwen_dist.batch import Batch
from cqwen_dist.config import Config
from cqwen_dist.model.lora import peft_config
from cqwen_dist.ops.products import dtype_of

PeerStep = Callable[..., None]  # (CPU micro-batches, end): one optimizer step, which calls `end` after each part


def peer_step(
    config: Config, architecture: dict[str, Any], device: torch.device, liger: bool = False, compiled: bool = False
) -> PeerStep:
    """Returns a function that takes one optimizer step.

    compiled: compile the full model, like Hugging Face's `torch_compile`. Raises ImportError if Liger is missing.
    """
    dtype = dtype_of(config.train.precision)
    settings = AutoConfig.for_model(**{**architecture, "tie_word_embeddings": False})
    settings.use_cache = False
    scalar = not config.learns_words
    if scalar:
        settings.num_labels, settings.pad_token_id = 1, settings.vocab_size - 1
    with device:
        base = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(
            settings, dtype=dtype
        )
    if liger:
        import liger_kernel.transformers as kernels

        getattr(kernels, f"apply_liger_kernel_to_{architecture['model_type']}")(
            model=base, fused_linear_cross_entropy=True
        )
    model = get_peft_model(base, peft_config(config.model.lora), autocast_adapter_dtype=False)
    (base.score if scalar else base.get_output_embeddings()).requires_grad_(True)
    if config.model.gradient_checkpointing:
        model.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        model.compile()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step(micro_batches: list[Batch], end: Callable[[str], None] = lambda part: None) -> None:
        for batch in micro_batches:
            on_device = batch.to(device)
            inputs = {name: getattr(on_device, name) for name in ("input_ids", "position_ids", "labels")}
            if scalar:
                inputs["labels"] = on_device.numeric_labels[:, -1].to(dtype)
            end("data")
            loss = model(**inputs).loss
            end("backbone_forward")
            (loss / len(micro_batches)).backward()
            end("backbone_backward")
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end("optimizer")

    return step
