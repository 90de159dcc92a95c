"""Translates Hugging Face's generation options: configs, processors, criteria, streamers, stop strings."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.generation_settings import check_temperature
from cqwen_dist.generate.generator import Watch
from cqwen_dist.generate.modes import find_mode
from cqwen_dist.generate.numbers import MOST_DIGITS, GeneratedNumbers
from cqwen_dist.generate.streaming import NumberStreamer, Tokenizer, ends_at
from cqwen_dist.heads.intervals import LEVELS

# Passed on to `Settings` unchanged.
PASSED_ON = ("decode_rule", "digits", "eps_truncation", "generator", "number_first", "seed", "used_rows")
PLAIN = ("eos_token_id", "pad_token_id", "use_cache", "cache_implementation", "compile_config", "disable_compile")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
LENGTH = ("max_new_tokens", "max_length", "max_time", "stop_strings", "num_return_sequences", "return_dict_in_generate")
WARPERS = ("temperature", "top_k", "top_p")
# Hugging Face turns each of these into a logits processor of loc_S, in `compatible`.
OF_LOGITS = (
    *("bad_words_ids", "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("forced_eos_token_id", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "remove_invalid_values"),
    *("renormalize_logits", "repetition_penalty", "sequence_bias", "suppress_tokens", "top_h", "typical_p"),
)
# Where a mode does not take the option: the value with which it has no effect, so callers may pass it. So may None.
_OFF = ("early_stopping", "low_memory", "output_attentions", "output_hidden_states", "output_logits", "output_scores")
NEUTRAL = {
    **dict.fromkeys((*_OFF, "remove_invalid_values", "renormalize_logits", "synced_gpus", "token_healing"), False),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty", "repetition_penalty"), 1.0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "top_p", "typical_p"), 1),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "min_p"), 0.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), 0),
    "logits_to_keep": 1,
}
# What to do instead of an option that no mode takes.
INSTEAD_OF = {
    "assistant_model": "None: each word needs the number before it, so nothing drafts ahead",
    "num_beams": "1; num_return_sequences with mode='ovr' gives several continuations",
    "output_logits": "False; forward gives the logits of every position",
    "output_scores": "False; forward with output_log_probs gives log P of every position",
    "penalty_alpha": "None; mode='compatible' takes repetition_penalty",
    "prefix_allowed_tokens_fn": "None; mode='compatible' takes it as a logits_processor",
    "synced_gpus": "False: a process generates by itself, so give each whole weights",
}
# The modes that take an option, where not all do.
ONLY_IN = {
    **dict.fromkeys((*OF_LOGITS, "logits_processor"), ("compatible",)),
    **dict.fromkeys(("top_k", "top_p"), ("compatible", "ovr")),
}
WHOLE = ("max_new_tokens", "max_length", "num_return_sequences", "top_k", "seed", "used_rows")
REAL = ("temperature", "top_p", "eps_truncation", "max_time")


@dataclass
class CausalQwenGeneration(ModelOutput):
    """The output with return_dict_in_generate: sequences [B,T'] int64 (prompt + continuation) and their numbers.

    For callers that only pass on tensors: numeric_values [B,T'] and numeric_intervals [B,T',levels,2]
    (`GeneratedNumbers.interval` at `LEVELS`), both float64.
    """

    sequences: Tensor | None = None
    numbers: GeneratedNumbers | None = None
    numeric_values: Tensor | None = None
    numeric_intervals: Tensor | None = None

    @classmethod
    def of(cls, sequences: Tensor, numbers: GeneratedNumbers) -> CausalQwenGeneration:
        """The output of a generation."""
        ends = torch.stack([torch.stack(numbers.interval(level), -1) for level in LEVELS], -2)
        return cls(sequences=sequences, numbers=numbers, numeric_values=numbers.values, numeric_intervals=ends)


def as_rows(device: torch.device, ids: Any, values: Any, mask: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A prompt as tensors [B,T]. Accepts lists, which a tokenizer returns without return_tensors.

    Raises `UserError` for rows of different lengths.
    """
    if isinstance(ids, Tensor):
        return ids, values, mask

    def tensor(rows: Any, dtype: torch.dtype) -> Any:
        return None if rows is None else torch.atleast_2d(torch.tensor(rows, dtype=dtype, device=device))

    try:
        return tensor(ids, torch.int64), tensor(values, torch.float64), tensor(mask, torch.int64)
    except (TypeError, ValueError):
        raise UserError("prompt", "no tensor", "rows of one length: tokenizer(texts, padding=True, ...)") from None


def translate(
    model: Any,
    ids: Tensor,
    mask: Tensor | None,
    mode: str | None,
    *,
    generation_config: GenerationConfig | None,
    logits_processor: Sequence[Any] | None,
    stopping_criteria: Sequence[Callable[..., Tensor]] | None,
    streamer: BaseStreamer | None,
    tokenizer: Tokenizer | None,
    given: dict[str, Any],
) -> tuple[dict[str, Any], int, bool]:
    """Translate a call of `CausalQwenForCausalLM.generate`. Returns (keywords for `generate.generator.generate`, rows
    per prompt, whether to return a `CausalQwenGeneration`).

    Priority: `given`, then generation_config where it differs from the model's (servers pass a copy of the model's),
    then the model's generation config. All modes except `compatible` only use lengths and end tokens from the model's
    config, as its temperature is meant for softmax. A generation config may also set the mode. Raises `UserError` for
    options that are unknown or not supported by the mode.
    """
    own = _set(model.generation_config)
    asked = _set(generation_config, own) | given
    mode = mode or asked.get("mode") or own.get("mode") or "standard"
    if isinstance(streamer, NumberStreamer):
        asked.setdefault("digits", streamer.digits)
    merged = _merged(own, asked, mode)
    options = {name: merged[name] for name in (*PASSED_ON, *PLAIN) if name in merged}
    mask = _mask_of(model, ids, merged) if mask is None else mask
    options |= {"mode": mode, "attention_mask": mask, "max_new_tokens": 64}
    if merged.get("max_new_tokens") is not None:
        options["max_new_tokens"] = int(merged["max_new_tokens"])
    elif merged.get("max_length") is not None:
        options["max_new_tokens"] = max(0, int(merged["max_length"]) - ids.shape[1])
    options |= _draws(
        model, ids, mask, mode, {**merged, "max_length": options["max_new_tokens"]}, logits_processor or ()
    )
    options["watch"] = _watch(ids, merged, stopping_criteria, streamer, tokenizer)
    return options, int(merged.get("num_return_sequences") or 1), bool(merged.get("return_dict_in_generate"))


def _draws(
    model: Any, ids: Tensor, mask: Tensor | None, mode: str, merged: dict[str, Any], own: Sequence[Any]
) -> dict[str, Any]:
    """What changes the draws of a mode. own: processors of logits. Raises `UserError`."""
    if own and mode != "compatible":
        raise UserError("logits_processor", "", _only_in("logits_processor"))
    if mode == "compatible":
        longest = min(ids.shape[1] + merged["max_length"], model.config.base_config.max_position_embeddings)
        return _sampling(model, ids, mask, {**merged, "max_length": longest}, own)
    if mode != "ovr":
        return {"temperature": merged.get("temperature")}
    warped = {name: merged[name] for name in WARPERS if merged.get(name) is not None}
    # top_k 0: transformers may have a default
    return _sampling(model, ids, mask, {"do_sample": True, "top_k": 0, **warped}, ()) if warped else {}


def _only_in(name: str) -> str:
    return f"nothing but in mode {' or '.join(ONLY_IN[name])}"


def _mask_of(model: Any, ids: Tensor, merged: dict[str, Any]) -> Tensor | None:
    """A mask [B,T] that is 0 at pad tokens at both ends, as transformers derives it without a given mask; None: all 1.

    If the pad token is also an end token, it may be text. Then there is no mask, only a warning if some rows start with
    it.
    """
    base = model.config.base_config
    pad, ends = merged.get("pad_token_id", base.pad_token_id), merged.get("eos_token_id", base.eos_token_id)
    if pad is None or pad < 0:
        return None
    if pad not in (ends if isinstance(ends, list | tuple) else [ends]):
        text = ids.ne(pad)
        return (text.cumsum(1) * text.flip(1).cumsum(1).flip(1) > 0).long()
    if len(ids[:, 0].eq(pad).unique()) > 1:
        said = f"generate: rows begin with pad_token_id, {pad}, which is read as text where there is no attention_mask"
        warnings.warn(said, stacklevel=5)
    return None


def _set(config: GenerationConfig | None, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a generation config that are set and differ from `known`."""
    if config is None:
        return {}
    recorded = ("transformers_version", "bos_token_id")
    found = {k: v for k, v in config.to_dict().items() if v is not None and k not in recorded and k[0] != "_"}
    return {k: v for k, v in found.items() if known is None or known.get(k) != v}


def _merged(own: dict[str, Any], asked: dict[str, Any], mode: str) -> dict[str, Any]:
    """Merge the options of the call with the model's options that the mode uses. Raises `UserError`."""
    asked = _with_effect(asked, mode)
    draws = find_mode(mode).draws
    if draws is not None and asked.get("do_sample") not in (None, draws):
        said = f"{draws}, as mode {mode} draws" + ("" if draws else " nothing; mode='compatible' or 'ovr' draws words")
        raise UserError("do_sample", asked["do_sample"], said)
    kept = (*PLAIN, *LENGTH, *SAMPLING, *OF_LOGITS) if mode == "compatible" else (*PLAIN, *LENGTH)
    return {**{name: value for name, value in own.items() if name in kept}, **asked}


def _with_effect(asked: dict[str, Any], mode: str) -> dict[str, Any]:
    """The options of a call that its mode takes, without those that have no effect. Raises `UserError` for others."""
    known = {*PASSED_ON, *PLAIN, *SAMPLING, *LENGTH, *OF_LOGITS}
    found = {}
    for name, value in asked.items():
        if name in known and mode in ONLY_IN.get(name, (mode,)):
            found[name] = value
            if value is not None:
                _check_kind(name, value)
        elif name != "mode" and value is not None and (name not in NEUTRAL or value != NEUTRAL[name]):
            near = difflib.get_close_matches(name, known, 1)
            other = "an option of this generate" + (f"; the nearest is {near[0]}" if near else "")
            raise UserError(name, value, _only_in(name) if name in known else INSTEAD_OF.get(name, other))
    return found


def _check_kind(name: str, value: Any) -> None:
    """Raises `UserError` for a value of the wrong type, or fewer than one return sequence."""
    if name in WHOLE and not isinstance(value, Integral):
        raise UserError(name, value, "a whole number")
    if name in REAL and not isinstance(value, Real):
        raise UserError(name, value, "a number")
    if name == "num_return_sequences" and value < 1:
        raise UserError(name, value, "1 or more")


def _sampling(
    model: Any, ids: Tensor, mask: Tensor | None, merged: dict[str, Any], own: Sequence[Any]
) -> dict[str, Any]:
    """Hugging Face's processors and warpers, in Hugging Face's order, and whether to sample.

    do_sample defaults to True if temperature, top_k, top_p, seed or generator is given, otherwise to False.
    """
    temperature = merged.get("temperature")
    check_temperature(temperature)
    top_k, top_p = merged.get("top_k"), merged.get("top_p")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError("top_p", top_p, "above 0, at most 1")
    if top_k is not None and top_k < 0:
        raise UserError("top_k", top_k, "0 (all words) or more")
    implied = any(merged.get(name) is not None for name in (*WARPERS, "seed", "generator"))
    sampling = bool(merged.get("do_sample", implied)) and temperature != 0.0
    ends = merged.get("eos_token_id", model.config.base_config.eos_token_id)
    settings = {n: merged[n] for n in (*OF_LOGITS, *SAMPLING, "pad_token_id", "max_length") if n in merged}
    settings |= {"do_sample": sampling, "eos_token_id": None if ends == [] else ends}  # []: there is no end
    if not sampling:
        settings.pop("temperature", None)
    try:
        config = GenerationConfig(**settings)
        model._prepare_special_tokens(config, True, device=ids.device)
        found = model._get_logits_processor(
            config,
            input_ids_seq_length=ids.shape[1],
            model_kwargs={} if mask is None else {"attention_mask": mask},
            device=ids.device,
            logits_processor=LogitsProcessorList(own),
        )
    except ValueError as error:
        raise UserError("generation_config", " ".join(str(error).split()), "values that transformers takes") from None
    return {"logits_processor": found if len(found) else None, "do_sample": sampling}


def _watch(
    ids: Tensor,
    merged: dict[str, Any],
    criteria: Sequence[Callable[..., Tensor]] | None,
    streamer: BaseStreamer | None,
    tokenizer: Tokenizer | None,
) -> list[Watch]:
    """Stopping criteria, stop strings and the streamer as `watch` functions, called after each step."""
    watch: list[Watch] = []
    prompt = ids.shape[1]
    ends = StoppingCriteriaList(criteria or ())
    if merged.get("max_time") is not None:
        ends.append(MaxTimeCriteria(float(merged["max_time"])))
    if ends:
        watch.append(lambda so_far, numbers: ends(so_far, None))
    strings = merged.get("stop_strings")
    if strings:
        if tokenizer is None:
            raise UserError("tokenizer", None, "the NumericalAwareTokenizer, where stop_strings are given")
        digits = MOST_DIGITS if merged.get("digits") is None else merged["digits"]
        watch.append(ends_at([strings] if isinstance(strings, str) else strings, tokenizer, prompt, digits))
    if isinstance(streamer, NumberStreamer):
        watch.append(lambda so_far, numbers: streamer.put(so_far.cpu(), numbers, prompt))
    elif streamer is not None:
        streamer.put(ids.cpu())  # Hugging Face's generate also puts the prompt, which some streamers skip
        watch.append(lambda so_far, numbers: streamer.put(so_far[:, -1].cpu()))
    return watch
