"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number goes back in as (<NUM>, its value), a word as (word, 0). Ids and values stay aligned throughout.
Letters: B rows, T prompt positions, T' positions at the end, C causal dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import DynamicCache

from cqwen_dist.config import UserError
from cqwen_dist.generate.modes import Action, Draws, Options, find_mode, warpers
from cqwen_dist.generate.numbers import GeneratedNumbers, empty_numbers
from cqwen_dist.intervals import Intervals
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import row_sizes
from cqwen_dist.ops.ovr.topk import prob_at
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


# What looks on after every step: (ids [B,t], their numbers so far) -> rows that end here [B] bool, or None.
Watch = Callable[[Tensor, GeneratedNumbers], Tensor | None]


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
    logits_processor: Callable[[Tensor, Tensor], Tensor] | None = None,
    decode_rule: Literal["ovr", "loc"] | None = None,
    eps_truncation: float = 0.0,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    used_rows: int | None = None,
    watch: Sequence[Watch] = (),
) -> tuple[Tensor, GeneratedNumbers]:
    """Continue prompts.

    input_ids [B,T] int64; numeric_values [B,T], raw unit, 0 at text (default: all text); attention_mask [B,T], 0 at
        the padding, which is on the left.
    mode: a name of `generate.modes.MODES`.
    max_new_tokens: at most so many; the end of the model's context also ends it.
    eos_token_id: one or several ids that end a row (default: the base's own; [] for none); a row that has ended is
        filled with pad_token_id (default: the base's own, else the first eos, else 0).
    temperature: in `compatible` divides the logits (0: greedy); in the modes that draw an individual or the noise
        multiplies the scale that is drawn from (1: as inferred, 0: no draw at all).
    do_sample, top_k (0: all), top_p, logits_processor ((ids, logits [B,V]) -> logits): of `compatible`. do_sample
        defaults to True where one of temperature, top_k, top_p, seed and generator is given, and else to False, as
        Hugging Face's.
    decode_rule: how the other modes rank words, by P ("ovr") or by loc_S ("loc"); default: the mode's own.
    eps_truncation: uniforms that are drawn stay so far from 0 and 1, which cuts a Cauchy's far tails off (0: not).
    generator, seed: of every draw (one of the two; default torch's global state). Each row draws for itself.
    used_rows: words from here on are never written, but for `compatible` (default: the config's; behind <NUM>, the
        first row that the tokenizer does not use, are spare ones).
    watch: called after every step with all that stands there; may end rows.

    Returns prompt + continuation [B,T'] int64 and their `GeneratedNumbers`. Raises `UserError` for an unknown mode,
    an empty prompt, one longer than the context, ids out of the vocabulary, values that are not finite, padding that
    is not on the left, and options out of range; ValueError for a head of which this process holds only a part.
    """
    chosen = find_mode(mode)
    action: Action = model.action
    check_prompt(model, input_ids, numeric_values, attention_mask)
    _check_options(max_new_tokens, temperature, top_p, top_k, decode_rule, used_rows, eps_truncation)
    base, num_token_id = model.config.base_config, int(model.config.num_token_id)
    sampling = any(option is not None for option in (temperature, top_k, top_p, seed, generator))
    heat = 1.0 if temperature is None else temperature
    processors: list[Any] = [] if logits_processor is None else [logits_processor]
    sampling = (sampling if do_sample is None else do_sample) and heat > 0.0
    if mode == "compatible" and sampling:
        processors += warpers(heat, top_k or 0, 1.0 if top_p is None else top_p)
    if getattr(base, "added_rows", 0):  # compatible is the base's softmax, and these are not the base's
        used = int(model.config.used_rows)
        processors.insert(
            0, lambda _, logits: logits.where(torch.arange(logits.shape[1], device=logits.device) < used, -math.inf)
        )
    device = input_ids.device
    draws = Draws(_generator(generator, seed, device), temperature=heat, eps_truncation=eps_truncation)
    ends = _as_list(base.eos_token_id if eos_token_id is None else eos_token_id)
    if pad_token_id is None:
        pad_token_id = next((t for t in (base.pad_token_id, *ends) if t is not None), 0)
    eos = torch.tensor(ends, dtype=torch.int64, device=device)

    b, prompt = input_ids.shape
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
    numbers = empty_numbers(values, model.target, Intervals.from_dict(model.config.calibration))
    done = torch.zeros(b, dtype=torch.bool, device=device)
    cache = DynamicCache(config=base) if use_cache else None

    with at_hand(model.action):
        options = Options(
            used_rows=int(model.config.used_rows) if used_rows is None else used_rows,
            rank_by=decode_rule or chosen.rank_by,
            do_sample=sampling,
            processors=_in_turn(processors) if processors else None,
            sizes=row_sizes(action.cls_weight) if total > prompt + 1 and chosen.ranks(decode_rule) else None,
        )
        home = action.cls_weight.device
        start, end = 0, prompt  # [start, end): what the model reads next
        while end < total and not bool(done.all()):
            u = model.infer(
                ids[:, start:end],
                values[:, start:end],
                mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                keep=torch.arange(1, b + 1, device=device) * (end - start) - 1,  # the last position of each row
            )
            u_prime = chosen.law(action, u.to(home), draws)
            seen = action.word_part(u_prime)
            word = chosen.choose(action, seen, draws, options, ids[:, :end].to(home))
            p_num, p_word = (p.to(device) for p in _probs(action, seen, num_token_id, word))
            y, word = action.value(u_prime), word.to(device)
            number = (word == num_token_id) & ~done
            ids[:, end] = torch.where(done, pad_token_id, word)
            y = Cauchy(y.loc.double().to(device), y.scale.double().to(device))
            values[:, end] = model.target.inverse(y.loc).where(number, 0.0)
            numbers.loc[:, end], numbers.scale[:, end] = y.loc.where(number, 0.0), y.scale.where(number, 0.0)
            numbers.p_num[:, end] = p_num.where(~done, math.nan)
            numbers.p_word[:, end] = p_word.where(~done, math.nan)
            numbers.generated[:, end] = number
            done = done | torch.isin(word, eos)
            start, end = (end if use_cache else 0), end + 1
            for look in watch:
                ended = look(ids[:, :end], numbers.until(end))
                done = done if ended is None else done | ended.to(device)
    return ids[:, :end], numbers.until(end)


def _in_turn(processors: Sequence[Callable[[Tensor, Tensor], Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
    def process(ids: Tensor, logits: Tensor) -> Tensor:
        for each in processors:
            logits = each(ids, logits)
        return logits

    return process


def _probs(action: Action, u: Cauchy, num_token_id: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """P of <NUM> and of each row's own word: [B] float64 each."""
    at = torch.cat([words.new_tensor([num_token_id]), words])
    p = prob_at(u.to(action.cls_weight.dtype), action.word_head(), at)
    return p[:, 0].double(), p[:, 1:].diagonal().double()


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, weights that accelerate keeps on a disk or on the CPU are where the module computes."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


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


def check_prompt(model: Model, ids: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
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
    eps_truncation: float,
) -> None:
    """Raises as `generate` says."""
    if not 0.0 <= eps_truncation < 0.5:
        raise UserError("eps_truncation", eps_truncation, "0 or more, below 0.5")
    if max_new_tokens < 0:
        raise UserError("max_new_tokens", max_new_tokens, "0 or more")
    check_sampling(temperature, top_k, top_p)
    if decode_rule not in (None, "ovr", "loc"):
        raise UserError("decode_rule", decode_rule, "ovr, loc")
    if used_rows is not None and used_rows < 1:
        raise UserError("used_rows", used_rows, "1 or more")


def check_sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    """Raises `UserError` for values out of range; None is always fine."""
    if temperature is not None and not 0.0 <= temperature < math.inf:
        raise UserError("temperature", temperature, "a number >= 0 (0: greedy)")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError("top_p", top_p, "above 0, at most 1")
    if top_k is not None and top_k < 0:
        raise UserError("top_k", top_k, "0 (all words) or more")
