"""Hugging Face's generation options translated to ours: configs, processors, criteria, streamers, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from cqwen_dist.config import UserError
from cqwen_dist.generate.generation_settings import check_sampling
from cqwen_dist.generate.generator import Watch
from cqwen_dist.generate.numbers import MOST_DIGITS, GeneratedNumbers
from cqwen_dist.generate.streaming import NumberStreamer, StopStrings, Tokenizer
from cqwen_dist.intervals import LEVELS

PASSED_ON = (
    "decode_rule",
    "digits",
    "eps_truncation",
    "generator",
    "seed",
    "used_rows",
)  # of `generate.generator.generate`
PLAIN = ("eos_token_id", "pad_token_id", "use_cache")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
LENGTH = ("max_new_tokens", "max_length", "max_time", "stop_strings", "num_return_sequences", "return_dict_in_generate")
# What Hugging Face makes into a processor of the logits, which only `compatible` has.
OF_LOGITS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
    "top_h",
    "typical_p",
)
# Accepted, and change nothing; the last two stand in every config that transformers makes for a model.
NEUTRAL = {
    "num_beams": 1,
    "guidance_scale": 1.0,
    "cache_implementation": "dynamic",
    "output_attentions": False,
    "output_hidden_states": False,
}


@dataclass
class CausalQwenGeneration(ModelOutput):
    """With return_dict_in_generate: sequences [B,T'] int64, prompt + continuation, their numbers, and of these again
    the values [B,T'] and the ends of their intervals [B,T',levels,2] (`GeneratedNumbers.interval` at `LEVELS`), both
    float64, for callers that hand on tensors only."""

    sequences: Tensor | None = None
    numbers: GeneratedNumbers | None = None
    numeric_values: Tensor | None = None
    numeric_intervals: Tensor | None = None

    @classmethod
    def of(cls, sequences: Tensor, numbers: GeneratedNumbers) -> CausalQwenGeneration:
        """All of a generation."""
        ends = torch.stack([torch.stack(numbers.interval(level), -1) for level in LEVELS], -2)
        return cls(sequences=sequences, numbers=numbers, numeric_values=numbers.values, numeric_intervals=ends)


@dataclass(frozen=True)
class Request:
    """A call translated: the mode, options of `generate.generator.generate`, rows a prompt, and the output's kind."""

    mode: str
    options: dict[str, Any]
    copies: int
    as_output: bool


def as_rows(device: torch.device, ids: Any, values: Any, mask: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A prompt as tensors [B,T]: what a tokenizer gives without return_tensors are lists, of one text or of several.

    Raises `UserError` for rows of different lengths.
    """
    if isinstance(ids, Tensor):
        return ids, values, mask
    given = ((ids, torch.int64), (values, torch.float64), (mask, torch.int64))
    try:
        rows: list[Any] = [
            x if x is None else torch.atleast_2d(torch.tensor(x, dtype=dtype, device=device)) for x, dtype in given
        ]
    except (TypeError, ValueError):
        raise UserError("prompt", "no tensor", "rows of one length: tokenizer(texts, padding=True, ...)") from None
    return rows[0], rows[1], rows[2]


COMPATIBLE_ALONE = "nothing but in mode compatible"


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
) -> Request:
    """A call of `CausalQwenForCausalLM.generate`.

    What is given counts before the call's generation_config (where that differs from the model's own, of which servers
    hand in a copy), and that before the model's own, of which the modes of this package (all but `compatible`) take
    lengths and ends only: its temperature was chosen for softmax. A mode may stand in a generation config as `mode`.
    Raises `UserError` for options that are unknown, or not of the mode.
    """
    own = _set(model.generation_config)
    asked = _set(generation_config, own) | given
    mode = mode or asked.get("mode") or own.get("mode") or "standard"
    if isinstance(streamer, NumberStreamer):
        asked.setdefault("digits", streamer.digits)
    compatible = mode == "compatible"
    merged = _merged(own, asked, compatible)
    if not compatible and logits_processor:
        raise UserError("logits_processor", "", COMPATIBLE_ALONE)
    options = {name: merged[name] for name in (*PASSED_ON, *PLAIN) if name in merged}
    options["attention_mask"] = mask
    options["max_new_tokens"] = _length(merged, ids.shape[1])
    if compatible:
        options.update(_processors(model, ids, mask, merged, logits_processor or ()))
    else:
        options.update({name: merged[name] for name in ("do_sample", "temperature") if name in merged})
    options["watch"] = _watch(ids, merged, stopping_criteria, streamer, tokenizer)
    return Request(
        mode, options, int(merged.get("num_return_sequences", 1)), bool(merged.get("return_dict_in_generate"))
    )


def _merged(own: dict[str, Any], asked: dict[str, Any], compatible: bool) -> dict[str, Any]:
    """What is asked for, before what of the model's own counts in the mode. Raises `UserError`."""
    asked = {name: value for name, value in asked.items() if name not in NEUTRAL or value != NEUTRAL[name]}
    asked.pop("mode", None)
    known = (*PASSED_ON, *PLAIN, *SAMPLING, *LENGTH, *OF_LOGITS)
    for name, value in asked.items():
        if name not in known:
            raise UserError(name, value, f"options out of {', '.join(sorted(known))}")
        if not compatible and name in (*OF_LOGITS, "top_k", "top_p"):  # only `compatible` has logits
            raise UserError(name, value, COMPATIBLE_ALONE)
    kept = (*PLAIN, *LENGTH, *SAMPLING, *OF_LOGITS) if compatible else (*PLAIN, *LENGTH)
    return {**{name: value for name, value in own.items() if name in kept}, **asked}


def _set(config: GenerationConfig | None, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a generation config says beyond what is known, without what it only records."""
    if config is None:
        return {}
    recorded = ("transformers_version", "bos_token_id")
    found = {k: v for k, v in config.to_dict().items() if v is not None and k not in recorded and k[0] != "_"}
    return {k: v for k, v in found.items() if known is None or known.get(k) != v}


def _length(merged: dict[str, Any], prompt: int) -> int:
    if "max_new_tokens" in merged:
        return int(merged["max_new_tokens"])
    return max(0, int(merged["max_length"]) - prompt) if "max_length" in merged else 64


def _processors(
    model: Any, ids: Tensor, mask: Tensor | None, merged: dict[str, Any], own: Sequence[Any]
) -> dict[str, Any]:
    """Hugging Face's own list of processors and warpers, in its order, and whether to sample."""
    temperature = merged.get("temperature")
    check_sampling(temperature, merged.get("top_k"), merged.get("top_p"))
    implied = any(name in merged for name in ("temperature", "top_k", "top_p", "seed", "generator"))
    sampling = bool(merged.get("do_sample", implied)) and temperature != 0.0
    settings = {n: merged[n] for n in (*OF_LOGITS, *SAMPLING, "eos_token_id", "pad_token_id") if n in merged}
    settings["do_sample"] = sampling
    if "eos_token_id" not in settings:
        settings["eos_token_id"] = model.config.base_config.eos_token_id
    if settings["eos_token_id"] == []:  # none, in our words
        settings["eos_token_id"] = None
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
    watch: list[Watch] = []
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
        watch.append(StopStrings([strings] if isinstance(strings, str) else strings, tokenizer, ids.shape[1], digits))
    if streamer is not None:
        prompt = ids.shape[1]
        if not isinstance(streamer, NumberStreamer):
            streamer.put(ids.cpu())  # as Hugging Face's generate does, for those that skip it
        watch.append(lambda so_far, numbers: _put(streamer, so_far, numbers, prompt))
    return watch


def _put(streamer: BaseStreamer, ids: Tensor, numbers: GeneratedNumbers, prompt: int) -> None:
    if isinstance(streamer, NumberStreamer):
        streamer.put(ids.cpu(), numbers, prompt)
    else:
        streamer.put(ids[:, -1].cpu())
