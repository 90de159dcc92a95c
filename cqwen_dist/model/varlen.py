"""Attention within packed texts, without a mask (`model.attention: varlen`).

With a mask [T,T], packed rows compute all scores, also between texts, repeat k and v for all query heads, and store the
mask. Here the texts of a batch are concatenated, [B T, heads, D], and use

    all of one length (no row is packed)   torch's causal attention over all texts at once
    CUDA, bf16 or fp16, D at most 256      one call of torch's variable-length kernel
    otherwise                              torch's causal attention, text by text

Positions may be split over ranks (`parallel.mappings`): then each rank attends with some heads over whole texts.

The attention function is registered with transformers under `WITHIN_TEXTS`, which is not part of saved configs. Calls
without `texts` (generation, exports, a plain base) get the usual mask. On a GPU: docs/gpu.md.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cqwen_dist.batch import Texts
from cqwen_dist.model.backbone import WITHIN_TEXTS
from cqwen_dist.parallel.mappings import Spread

Kernel = Callable[..., Tensor]


def attend_within_texts(transformer: Any) -> None:
    """Let calls of a transformer with `texts` attend within each text."""
    AttentionInterface.register(WITHIN_TEXTS, _attention)
    AttentionMaskInterface.register(WITHIN_TEXTS, sdpa_mask)
    transformer.set_attn_implementation(WITHIN_TEXTS)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    texts: Texts | None = None,
    spread: Spread | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: q [B,heads,T,D], k and v [B,kv_heads,T,D] -> [B,T,heads,D], no weights.

    texts: of the batch. None: attention_mask is a mask, as for "sdpa". spread: for a part of the batch's positions
    (`Batch.part`), what runs attention over the positions of all ranks.
    """
    if texts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    how = options["scaling"], options.get("dropout", 0.0), options.get("sliding_window")

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = _within(*(x.flatten(0, 1) for x in qkv), texts, *how)
        return out.unflatten(0, (len(query), -1))

    qkv = [x.transpose(1, 2) for x in (query, key, value)]
    return attend(*qkv) if spread is None else spread(attend, *qkv), None


@torch.compiler.disable  # text lengths differ between batches: each would be compiled again
def _within(q: Tensor, k: Tensor, v: Tensor, texts: Texts, scale: float, dropout: float, window: int | None) -> Tensor:
    """q [N,heads,D], k and v [N,kv_heads,D] of N = B T positions -> [N,heads,D].

    window: number of tokens that a token sees, including itself; None: all earlier tokens of the text.
    """
    window = window if window is not None and window < texts.longest else None
    if window is None and len(q) == len(texts.lengths) * texts.longest:
        return _even(q, k, v, texts.longest, scale, dropout, None)
    kernel = None if dropout or not q.is_cuda else kernel_for(q.dtype, q.shape[-1], window)
    if kernel is not None:
        return kernel(q, k, v, texts.begin, texts.longest, scale)
    parts = zip(q.split(texts.lengths), k.split(texts.lengths), v.split(texts.lengths), strict=True)
    return torch.cat([_even(*part, len(part[0]), scale, dropout, window) for part in parts])


def _even(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, dropout: float, window: int | None) -> Tensor:
    """`_within` for texts of one length."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    seen = None
    if window is not None and window < length:
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out = F.scaled_dot_product_attention(
        q, k, v, seen, dropout, is_causal=seen is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def kernel_for(dtype: torch.dtype, width: int, window: int | None) -> Kernel | None:
    """The kernel for all texts of a batch on this GPU; None if there is none.

    width: D. Returns: (q, k, v, begin, longest, scale) -> [N,heads,D], begin and longest as of `Texts`.
    """
    if dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256 or not _has_flash():
        return None
    return _kernel(window)


@cache
def _has_flash() -> bool:
    """Whether this GPU runs FlashAttention-2: Ampere and later."""
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)


@cache
def _kernel(window: int | None) -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    call: Any = varlen_attn
    takes = inspect.signature(call).parameters
    seen = (-1 if window is None else window - 1, 0)  # tokens before oneself, and behind

    def run(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, longest: int, scale: float) -> Tensor:
        # the kernel shares key heads in every version; later ones want to be told
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in takes else {}
        out: Tensor = call(q, k, v, begin, begin, longest, longest, scale=scale, window_size=seen, **grouped)
        return out

    return run
