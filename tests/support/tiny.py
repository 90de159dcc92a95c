"""Tiny bases of every kind, built from a seed in memory."""

from typing import Any

import torch
from transformers import PreTrainedModel

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.base_loading import build_base

HIDDEN = 24
VOCAB = 101  # not divisible by 2 or 4
NUM = 90  # <NUM>; the rows behind it are spare
CONTEXT = 64
FURTHER = {  # sizes of linear attention and of experts
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,  # the kernel of experts wants rows of 16 bytes
    "shared_expert_intermediate_size": 18,
}
TARGET = {"name": "standardise", "median": 150.0, "scale": 40.0}


def tiny_sizes(kind: str = "qwen2", *, tied: bool = False) -> dict[str, Any]:
    """The `model.architecture` of `tiny_base`."""
    architecture = {
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    architecture |= {key: size for key, size in FURTHER.items() if key in ARCHITECTURES[kind].defaults}
    if kind in ("qwen2", "qwen2_moe", "phi3"):
        del architecture["head_dim"]  # they have none: H / heads
    if kind == "qwen3_5_moe_text":
        del architecture["intermediate_size"]
    if len(ARCHITECTURES[kind].mixers) > 1:
        architecture["layer_types"] = [*ARCHITECTURES[kind].mixers]  # one layer each
    if kind == "llama":
        rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        architecture |= {"rope_parameters": {**rope, "rope_theta": 5e5, "original_max_position_embeddings": 16}}
    if kind == "phi3":
        architecture |= {"pad_token_id": 0}
    if kind in ("mistral", "phi3", "gemma3_text"):
        architecture |= {"sliding_window": 5}
    return architecture


def tiny_base(kind: str = "qwen2", *, tied: bool = False, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random causal base: H 24, 2 layers, V 101, context 64, fp32. Weights are ten times the usual initialiser's,
    so that attention, positions and logits differ visibly between tokens."""
    return build_base({**tiny_sizes(kind, tied=tied), **changes}, seed).eval()


def tiny_model(
    kind: str = "qwen2",
    *,
    tied: bool = False,
    seed: int = 0,
    start: str = "seed",
    num_token_id: int = NUM,
    base: dict[str, Any] | None = None,
    **shape: Any,
) -> CausalQwenModel:
    """That base turned causal; base: changes of its architecture."""
    torch.manual_seed(seed + 1)  # w_num and W_reg
    built = tiny_base(kind, tied=tied, seed=seed, **(base or {}))
    return CausalQwenModel.from_base_model(built, start=start, num_token_id=num_token_id, **shape).eval()


def tiny_causal_lm(kind: str = "qwen2", **options: Any) -> CausalQwenForCausalLM:
    """The same with its Hugging Face face."""
    model = tiny_model(kind, **options)
    return CausalQwenForCausalLM(model.config, model).eval()


def random_ids(rows: int, length: int, seed: int = 0, high: int = NUM) -> torch.Tensor:
    """Word ids [rows, length] int64 below `high`: text without numbers."""
    return torch.randint(0, high, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_batch(rows: int = 4, length: int = 12, *, numbers: bool = True, seed: int = 0, num: int = NUM) -> Batch:
    """Left-aligned sequences of different lengths, a fifth of the tokens <NUM>, labels shifted."""
    g = torch.Generator().manual_seed(seed)
    ids = random_ids(rows, length + 1, seed, num)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    if numbers:
        is_num = torch.rand(ids.shape, generator=g) < 0.2
        is_num[0, 3] = True
        ids[is_num] = num
        values[is_num] = (torch.randn(ids.shape, generator=g, dtype=torch.float64) * 30)[is_num]
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=g)
    lengths[0] = length
    position = torch.arange(length)
    mask = position < lengths[:, None]
    keep = position < lengths[:, None] - 1
    labels = ids[:, 1:].masked_fill(~keep, IGNORE_INDEX)
    return Batch(
        input_ids=ids[:, :-1],
        numeric_values=values[:, :-1],
        attention_mask=mask,
        position_ids=position.expand(rows, -1).contiguous(),
        labels=labels,
        numeric_labels=values[:, 1:].masked_fill(~keep, 0.0),
        numeric_mask=labels == num,
    )


def number_writer(kind: str = "qwen2", **shape: Any) -> CausalQwenModel:
    """Writes <NUM> now and then: its threshold is low. Scales are small, so that words differ."""
    net = tiny_model(kind, number_dims=2, target=TARGET, **shape)
    with torch.no_grad():
        net.abduction.set_scale(0.05)
        net.action.b_noise.fill_(0.05)
        net.action.threshold.fill_(1.0)
        net.action.threshold[NUM] = -0.5
    return net


def number_writing_lm() -> CausalQwenForCausalLM:
    """With its Hugging Face face, and numbers near 150 in the unit of `Words`' texts. Without number dimensions."""
    lm = tiny_causal_lm(target={"name": "standardise", "median": 150.0, "scale": 40.0})
    with torch.no_grad():
        lm.model.abduction.set_scale(0.05)
        lm.model.action.threshold.fill_(1.0)
        lm.model.action.threshold[NUM] = -0.5
    return lm


def number_prompts(padded: bool = True, seed: int = 5) -> dict[str, torch.Tensor]:
    """Three prompts of 8 tokens, or of 8, 3 and 1 padded on the left; numbers in all of them."""
    ids, values, mask = random_ids(3, 8, seed=seed), torch.zeros(3, 8, dtype=torch.float64), torch.ones(3, 8)
    for row, length in enumerate((8, 3, 1) if padded else ()):
        mask[row, : 8 - length] = 0
    ids = ids.masked_fill(mask == 0, 0)
    for row, (at, value) in enumerate(((2, 99.9), (6, -7.0), (7, 1e9))):
        ids[row, at], values[row, at] = NUM, value
    return {"input_ids": ids, "numeric_values": values, "attention_mask": mask}
