"""Translates Hugging Face's generation options: configs, processors, criteria, streamers, stop strings."""

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.generation_settings import DRAWING, Prompt, check_temperature, mode_as_asked
from cqwen_dist.generate.generator import Watch
from cqwen_dist.generate.modes import ModeName, find_mode, mode_names
from cqwen_dist.generate.numbers import MOST_DIGITS, GeneratedNumbers
from cqwen_dist.generate.streaming import NumberStreamer, Tokenizer, ends_at
from cqwen_dist.heads.intervals import LEVELS

# Passed on to `Settings` unchanged.
PASSED_ON = (
    *("abstain", "decode_rule", "digits", "eps_truncation", "generator", "number_first", "seed", "used_rows"),
    "word_temperature",
)
PLAIN = ("eos_token_id", "pad_token_id", "use_cache", "cache_implementation", "compile_config", "disable_compile")
SAMPLING = ("do_sample", *DRAWING)
LENGTH = ("max_new_tokens", "max_length", "max_time", "stop_strings", "num_return_sequences", "return_dict_in_generate")
# Hugging Face turns each of these into a logits processor.
OF_LOGITS = (
    *("bad_words_ids", "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("forced_eos_token_id", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "remove_invalid_values"),
    *("renormalize_logits", "repetition_penalty", "sequence_bias", "suppress_tokens", "top_h", "typical_p"),
)
CHANGES = (*OF_LOGITS, "prefix_allowed_tokens_fn")
# Options of these modes alone: a processor sees loc_S in `compatible`, log P in `ovr`
LOGIT_MODES = ("compatible", "ovr")
OF_LOGIT_MODES = {*CHANGES, "logits_processor", "top_k", "top_p"}
# If a mode does not take the option: the value with which it has no effect, so callers may pass it. So may None.
_OFF = ("early_stopping", "low_memory", "output_attentions", "output_hidden_states", "output_logits", "output_scores")
NEUTRAL = {
    **dict.fromkeys((*_OFF, "remove_invalid_values", "renormalize_logits", "synced_gpus", "token_healing"), False),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty", "repetition_penalty"), 1.0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "top_p", "typical_p"), 1),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "min_p"), 0.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), 0),
    "is_assistant": False,
}
# Advice for options that no mode takes.
INSTEAD_OF = {
    "num_beams": "1; there are no beams, as each would need numbers of its own",
    **dict.fromkeys(("output_scores", "output_logits"), "False; model(...) gives logits, and log P"),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "False; model(...) gives them"),
    **dict.fromkeys(("cache", "past_key_values"), "None; a call reads its whole prompt"),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "None; there are no drafts of numbers"),
    "guidance_scale": "1; it reads the text once more without its numbers",
    "penalty_alpha": "None; mode='compatible' takes repetition_penalty",
    "prefill_chunk_size": "None; a prompt is read at once",
    "synced_gpus": "False: a process generates by itself, so give each whole weights",
}
NOT_HERE = f"nothing but in mode {' or '.join(LOGIT_MODES)}"
WHOLE = ("max_new_tokens", "max_length", "num_return_sequences", "top_k", "seed", "used_rows")
REAL = ("abstain", "temperature", "top_p", "eps_truncation", "max_time")


@dataclass
class CausalQwenGeneration(GenerateDecoderOnlyOutput):
    """The output with return_dict_in_generate: sequences [B,T'] int64 (prompt + continuation) and their numbers.

    For callers that only pass on tensors: numeric_values [B,T'] and numeric_intervals [B,T',levels,2]
    (`GeneratedNumbers.interval` at `LEVELS`), both float64. The other fields are transformers', on request.
    """

    numbers: GeneratedNumbers | None = None
    numeric_values: Tensor | None = None
    numeric_intervals: Tensor | None = None


def with_numbers(sequences: Any, numbers: GeneratedNumbers) -> CausalQwenGeneration:
    """The output of a generation: sequences and their numbers."""
    ends = torch.stack([torch.stack(numbers.interval(level), -1) for level in LEVELS], -2)
    return CausalQwenGeneration(
        sequences=sequences, numbers=numbers, numeric_values=numbers.values, numeric_intervals=ends
    )


@dataclass(frozen=True)
class Call:
    """A call of `CausalQwenForCausalLM.generate`, translated."""

    options: dict[str, Any]  # for `generate.generator.generate`
    copies: int  # rows per prompt
    as_output: bool  # whether to return a `CausalQwenGeneration`


def translate(
    model: Any,
    prompt: Prompt,
    mode: ModeName | None,
    *,
    generation_config: GenerationConfig | None,
    logits_processor: Sequence[Any] | None,
    stopping_criteria: Sequence[Callable[..., Tensor]] | None,
    streamer: BaseStreamer | None,
    tokenizer: Tokenizer | None,
    watch: Sequence[Watch],
    given: dict[str, Any],
) -> Call:
    """Translate a call of `CausalQwenForCausalLM.generate`.

    Without a mode, sampling settings choose it (`mode_as_asked`).

    Priority: `given`, then generation_config if it differs from the model's (servers pass a copy of the model's),
    then the model's generation config. All modes except `compatible` only use lengths and end tokens from the model's
    config, as its temperature is meant for softmax. A generation config may also set the mode. Raises `UserError` for
    options that are unknown or not supported by the mode.
    """
    own = _set(model.generation_config)
    asked = _set(generation_config, own) | given
    mode = mode or asked.get("mode") or own.get("mode")
    if mode is None:
        mode, asked = mode_as_asked(asked)
    if isinstance(streamer, NumberStreamer):
        asked.setdefault("digits", streamer.digits)
    words, numbers = mode_names(mode)
    merged = _merged(own, asked, words)
    options = {name: merged[name] for name in (*PASSED_ON, *PLAIN) if merged.get(name) is not None}
    ids = prompt.ids
    mask = _mask_of(model, ids, merged) if prompt.mask is None else prompt.mask
    options |= {"mode": mode, "attention_mask": mask, "max_new_tokens": 64}
    if merged.get("max_new_tokens") is not None:
        options["max_new_tokens"] = int(merged["max_new_tokens"])
    elif merged.get("max_length") is not None:
        options["max_new_tokens"] = max(0, int(merged["max_length"]) - ids.shape[1])
    seen, apart = ids[:, prompt.hidden :], dict[str, Any]()  # by processors
    if numbers is not None and find_mode(words).has_logits:
        merged["temperature"], apart = _temperatures(words, own, asked, options.pop("word_temperature", "auto"))
    options |= _draws(
        model, seen, mask, words, {**merged, "max_length": options["max_new_tokens"]}, logits_processor or ()
    )
    options |= apart
    copies, as_output = int(merged.get("num_return_sequences") or 1), bool(merged.get("return_dict_in_generate"))
    options["logits_processor"] = _past(prompt.hidden, options.get("logits_processor"))
    options["watch"] = [*_watch(ids, merged, stopping_criteria, streamer, tokenizer), *watch]
    return Call(options, copies, as_output)


def _draws(
    model: Any, ids: Tensor, mask: Tensor | None, mode: str, merged: dict[str, Any], own: Sequence[Any]
) -> dict[str, Any]:
    """Options that change the draws of a mode. own: processors of logits. Raises `UserError`."""
    if own and mode not in LOGIT_MODES:
        raise UserError("logits_processor", "", NOT_HERE)
    longest = min(ids.shape[1] + merged["max_length"], model.config.max_position_embeddings)
    merged = {**merged, "max_length": longest}
    if mode == "compatible":
        return _sampling(model, ids, mask, merged, own)
    if mode != "ovr":
        return {"temperature": merged.get("temperature")}
    if not own and not any(merged.get(name) is not None for name in (*DRAWING, *CHANGES)):
        return {}
    top_k = merged.get("top_k") or 0  # transformers may have a default
    return _sampling(model, ids, mask, {**merged, "do_sample": True, "top_k": top_k}, own)


def _past(hidden: int, processors: Any) -> Any:
    """The processors, for texts whose first positions have no ids that they may see."""
    return processors and (lambda ids, logits: processors(ids[:, hidden:], logits)) if hidden else processors


def _temperatures(words: str, own: dict[str, Any], asked: dict[str, Any], wide: Any) -> tuple[Any, dict[str, Any]]:
    """(the temperature of the processors, that of numbers), if numbers have a mode of their own. wide: of words."""
    of_base = own.get("temperature") if words == "compatible" else None
    return of_base if wide == "auto" else wide, {"temperature": asked.get("temperature")}


def _mask_of(model: Any, ids: Tensor, merged: dict[str, Any]) -> Tensor | None:
    """A mask [B,T] that is 0 at pad tokens at both ends, as transformers derives it without a given mask; None: all 1.

    If the pad token is also an end token, it may be text. Then there is no mask, only a warning if some rows start with
    it.
    """
    config = model.config
    pad, ends = merged.get("pad_token_id", config.pad_token_id), merged.get("eos_token_id", config.eos_token_id)
    if pad is None or pad < 0:
        return None
    if pad not in (ends if isinstance(ends, list | tuple) else [ends]):
        text = ids.ne(pad)
        return (text.cumsum(1) * text.flip(1).cumsum(1).flip(1) > 0).long()
    if len(ids[:, 0].eq(pad).unique()) > 1:
        said = f"generate: rows begin with pad_token_id, {pad}, which is read as text without an attention_mask"
        warnings.warn(said, stacklevel=5)
    return None


def _set(config: GenerationConfig | None, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options that a generation config sets to other values than `known` has."""
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
    known = {*PASSED_ON, *PLAIN, *SAMPLING, *LENGTH, *CHANGES}
    found = {}
    for name, value in asked.items():
        if name in known and (mode in LOGIT_MODES or name not in OF_LOGIT_MODES):
            found[name] = value
            if value is not None:
                _check_kind(name, value)
        elif (
            name not in ("mode", "logits_to_keep")
            and value is not None
            and (name not in NEUTRAL or value != NEUTRAL[name])
        ):
            near = difflib.get_close_matches(name, known, 1)
            other = "an option of this generate" + (f"; the nearest is {near[0]}" if near else "")
            raise UserError(name, value, NOT_HERE if name in known else INSTEAD_OF.get(name, other))
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
    implied = any(merged.get(name) is not None for name in (*DRAWING, "seed", "generator"))
    sampling = bool(merged.get("do_sample", implied)) and temperature != 0.0
    ends = merged.get("eos_token_id", model.config.eos_token_id)
    settings = {n: merged[n] for n in (*OF_LOGITS, *SAMPLING, "pad_token_id", "max_length") if n in merged}
    settings |= {"do_sample": sampling, "eos_token_id": None if ends == [] else ends}  # []: there is no end
    if not sampling:
        settings.pop("temperature", None)
    rows = merged.get("num_return_sequences") or 1  # texts of a prompt
    with _refused_by_transformers():
        config = GenerationConfig(**settings)
        config.num_return_sequences = rows
        model._prepare_special_tokens(config, True, device=ids.device)
        found = model._get_logits_processor(
            config,
            input_ids_seq_length=ids.shape[1],
            model_kwargs={} if mask is None else {"attention_mask": mask.repeat_interleave(rows, 0)},
            device=ids.device,
            prefix_allowed_tokens_fn=merged.get("prefix_allowed_tokens_fn"),
            logits_processor=LogitsProcessorList(own),
        )
    return {"logits_processor": found if len(found) else None, "do_sample": sampling}


@contextmanager
def _refused_by_transformers() -> Iterator[None]:
    """Turns an error raised inside transformers into a `UserError`."""
    try:
        yield
    except ValueError as error:
        said = " ".join(str(error).split())
        raise UserError("generation_config", said, "values that transformers takes") from None


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
            raise UserError("tokenizer", None, "the NumericalAwareTokenizer, if stop_strings are given")
        digits = MOST_DIGITS if merged.get("digits") is None else merged["digits"]
        watch.append(ends_at([strings] if isinstance(strings, str) else strings, tokenizer, prompt, digits))
    if isinstance(streamer, NumberStreamer):
        watch.append(lambda so_far, numbers: streamer.put(so_far.cpu(), numbers, prompt))
    elif streamer is not None:
        streamer.put(ids.cpu())  # Hugging Face's generate also puts the prompt, which some streamers skip
        watch.append(lambda so_far, numbers: streamer.put(so_far[:, -1].cpu()))
    return watch
