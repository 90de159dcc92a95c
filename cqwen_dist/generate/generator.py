"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number goes back in as (<NUM>, its value), a word as (word, 0). Ids and values stay aligned throughout.
Letters: B rows, T prompt positions, T' positions at the end, C causal dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from cqwen_dist.config import UserError
from cqwen_dist.generate.modes import Action, Draws, Options, find_mode
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import ovr_prob_at
from cqwen_dist.targets import TargetTransform


class Model(Protocol):
    """What is used of `model.CausalQwenModel`."""

    @property
    def action(self) -> Any: ...  # an `Action`

    @property
    def target(self) -> TargetTransform: ...

    @property
    def config(self) -> Any: ...  # a `CausalQwenConfig`

    def infer(
        self,
        input_ids: Tensor,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **context: Any,
    ) -> Cauchy: ...


@dataclass(frozen=True)
class GeneratedNumbers:
    """The numbers of prompt and continuation, aligned with the ids."""

    values: Tensor  # [B,T'] float64, raw unit; 0 at text
    generated: Tensor  # [B,T'] bool: a number that the model wrote
    loc: Tensor  # [B,T'] float64, location of Y in the target's unit; 0 where not generated
    scale: Tensor  # [B,T'] float64, its scale; 0 where not generated
    p_num: Tensor  # [B,T'] float64, P of <NUM> when it was written; 0 where not generated
    target: TargetTransform

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """(low, high), each [B,T'] float64 in the raw unit: the central interval of Y, nan where not generated.

        The Cauchy's own quantiles at (1 -+ level)/2, through the inverse of the target transform. Raises ValueError
        unless 0 < level < 1.
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"level must be between 0 and 1, found {level}")
        law = Cauchy(self.loc, self.scale)
        low, high = (self.target.inverse(law.quantile(0.5 + sign * level / 2)) for sign in (-1, 1))
        return low.where(self.generated, math.nan), high.where(self.generated, math.nan)


OnToken = Callable[[Tensor, Tensor], None]


@torch.no_grad()
def generate(
    model: Model,
    input_ids: Tensor,
    numeric_values: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    mode: str = "standard",
    max_new_tokens: int = 64,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    decode_rule: Literal["ovr", "loc"] | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    used_rows: int | None = None,
    on_token: OnToken | None = None,
) -> tuple[Tensor, GeneratedNumbers]:
    """Continue prompts.

    input_ids [B,T] int64; numeric_values [B,T], raw unit, 0 at text (default: all text); attention_mask [B,T], 0 at
        the padding, which is on the left.
    mode: a name of `generate.modes.MODES`.
    max_new_tokens: at most so many; the end of the model's context also ends it.
    eos_token_id: one or several ids that end a row (default: the base's own; [] for none); a row that has ended is
        filled with pad_token_id (default: the base's own, else the first eos, else 0).
    do_sample, temperature (0: greedy), top_k (0: all), top_p: of `compatible`. do_sample defaults to True where one
        of the other three, a seed or a generator is given, and else to False, as Hugging Face's.
    decode_rule: how the other modes rank words, by P ("ovr") or by loc_S ("loc"); default: the mode's own.
    generator, seed: of every draw (one of the two; default torch's global state). Each row draws for itself.
    used_rows: words from here on are never written, but for `compatible` (default: the config's; behind <NUM>, the
        first row that the tokenizer does not use, are spare ones).
    on_token: called after every step with its (ids [B] int64, values [B] float64).

    Returns prompt + continuation [B,T'] int64 and their `GeneratedNumbers`. Raises `UserError` for an unknown mode,
    an empty prompt, one longer than the context, ids out of the vocabulary, values that are not finite, padding that
    is not on the left, and options out of range; ValueError for a head of which this process holds only a part.
    """
    chosen = find_mode(mode)
    action: Action = model.action
    _check_prompt(model, input_ids, numeric_values, attention_mask)
    _check_options(max_new_tokens, temperature, top_p, top_k, decode_rule, used_rows)
    base, num_token_id = model.config.base_config, int(model.config.num_token_id)
    sampling = any(option is not None for option in (temperature, top_k, top_p, seed, generator))
    options = Options(
        used_rows=int(model.config.used_rows) if used_rows is None else used_rows,
        rank_by=decode_rule or chosen.rank_by,
        do_sample=sampling if do_sample is None else do_sample,
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
    )
    draws = Draws(_generator(generator, seed, input_ids.device))
    ends = _as_list(base.eos_token_id if eos_token_id is None else eos_token_id)
    if pad_token_id is None:
        pad_token_id = next((t for t in (base.pad_token_id, *ends) if t is not None), 0)
    eos = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)

    b, prompt = input_ids.shape
    device = input_ids.device
    total = min(prompt + max_new_tokens, max(prompt, base.max_position_embeddings))
    ids = torch.full((b, total), pad_token_id, dtype=torch.int64, device=device)
    ids[:, :prompt] = input_ids
    values = torch.zeros((b, total), dtype=torch.float64, device=device)
    if numeric_values is not None:
        values[:, :prompt] = numeric_values.to(values)
    mask = torch.ones((b, total), dtype=torch.bool, device=device)
    if attention_mask is not None:
        mask[:, :prompt] = attention_mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    loc, scale, p_num = torch.zeros_like(values), torch.zeros_like(values), torch.zeros_like(values)
    generated = torch.zeros_like(mask)
    done = torch.zeros(b, dtype=torch.bool, device=device)
    cache = DynamicCache(config=base) if use_cache else None

    start, end = 0, prompt  # [start, end): what the model reads next
    while end < total and not bool(done.all()):
        read = slice(start, end)
        u = model.infer(
            ids[:, read],
            values[:, read],
            mask[:, :end],
            position_ids=positions[:, read],
            past_key_values=cache,
        )
        u_prime = chosen.law(action, Cauchy(u.loc[:, -1], u.scale[:, -1]), draws)
        seen = action.word_part(u_prime)
        word = chosen.choose(action, seen, draws, options)
        number = (word == num_token_id) & ~done
        y = action.value(u_prime)
        ids[:, end] = torch.where(done, pad_token_id, word)
        values[:, end] = model.target.inverse(y.loc).where(number, 0.0)
        loc[:, end], scale[:, end] = y.loc.double().where(number, 0.0), y.scale.double().where(number, 0.0)
        p_num[:, end] = _prob_of(action, seen, num_token_id).where(number, 0.0)
        generated[:, end] = number
        if on_token is not None:
            on_token(ids[:, end], values[:, end])
        done = done | torch.isin(word, eos)
        start, end = (end if use_cache else 0), end + 1

    values, generated, loc, scale, p_num = (t[:, :end] for t in (values, generated, loc, scale, p_num))
    return ids[:, :end], GeneratedNumbers(values, generated, loc, scale, p_num, model.target)


def _prob_of(action: Action, u: Cauchy, word: int) -> Tensor:
    """P of one word: [B] float64."""
    weight = action.cls_weight
    at = torch.tensor([word], device=weight.device)
    p = ovr_prob_at(u.loc.to(weight.dtype), u.scale.to(weight.dtype), weight, action.cls_bias, action.threshold, at)
    return p[:, 0].double()


def _generator(generator: torch.Generator | None, seed: int | None, device: torch.device) -> torch.Generator | None:
    if seed is None:
        return generator
    if generator is not None:
        raise UserError("seed", seed, "a seed or a generator, not both")
    return torch.Generator(device).manual_seed(seed)


def _as_list(ids: int | Sequence[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _check_prompt(model: Model, ids: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
    """Raises as `generate` says."""
    action: Action = model.action
    v, context = action.vocab_size, model.config.base_config.max_position_embeddings
    if action.cls_weight.shape[0] != v:
        raise ValueError(f"the head holds {action.cls_weight.shape[0]} of {v} words here: gather it first")
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise UserError("prompt", f"{ids.dtype} of shape {tuple(ids.shape)}", "token ids [B,T], int64")
    if ids.numel() == 0:
        raise UserError("prompt", "no tokens", "at least one token in every row")
    if ids.shape[1] > context:
        raise UserError("prompt", f"{ids.shape[1]} tokens", f"at most {context}, the model's context")
    if int(ids.min()) < 0 or int(ids.max()) >= v:
        bad = int(ids[(ids < 0) | (ids >= v)][0])
        raise UserError("prompt", f"token id {bad}", f"ids in [0, {v})")
    for name, tensor in (("numeric_values", values), ("attention_mask", mask)):
        if tensor is not None and tensor.shape != ids.shape:
            raise UserError(name, f"shape {tuple(tensor.shape)}", f"the prompt's shape, {tuple(ids.shape)}")
    if values is not None and not bool(values.isfinite().all()):
        raise UserError("numeric_values", float(values[~values.isfinite()][0]), "finite numbers")
    if mask is not None:
        real = mask.bool()
        if not bool(real.any(1).all()):
            raise UserError("prompt", "no tokens", "at least one token in every row")
        if bool((real[:, 1:] < real[:, :-1]).any()):
            raise UserError("attention_mask", "padding after a token", "padding on the left only")


def _check_options(
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    decode_rule: str | None,
    used_rows: int | None,
) -> None:
    """Raises as `generate` says."""
    if max_new_tokens < 0:
        raise UserError("max_new_tokens", max_new_tokens, "0 or more")
    if temperature is not None and not 0.0 <= temperature < math.inf:
        raise UserError("temperature", temperature, "a number >= 0 (0: greedy)")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError("top_p", top_p, "above 0, at most 1")
    if top_k is not None and top_k < 0:
        raise UserError("top_k", top_k, "0 (all words) or more")
    if decode_rule not in (None, "ovr", "loc"):
        raise UserError("decode_rule", decode_rule, "ovr, loc")
    if used_rows is not None and used_rows < 1:
        raise UserError("used_rows", used_rows, "1 or more")
