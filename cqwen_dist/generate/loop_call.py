"""`generate` calls that transformers runs in its loops: beams, scores, and its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.generation_settings import Prompt, Settings
from cqwen_dist.generate.generator import Watch
from cqwen_dist.generate.numbers import Digits
from cqwen_dist.generate.streaming import NumberStreamer

PLAIN = ("eos_token_id", "pad_token_id", "use_cache", "cache_implementation", "compile_config", "disable_compile")
BEAMS = ("num_beams", "length_penalty", "early_stopping")
SEEN = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CACHES = ("cache", "past_key_values", "cache_config", "position_ids")
LOOPS = (*BEAMS, *SEEN, *CACHES)
STARTS_A_LOOP = ("num_beams", *SEEN, *CACHES)


@contextmanager
def refused_by_transformers() -> Iterator[None]:
    """Turns an error raised inside transformers into a `UserError`."""
    try:
        yield
    except ValueError as error:
        said = " ".join(str(error).split())
        raise UserError("generation_config", said, "values that transformers takes") from None


@dataclass(frozen=True)
class LoopCall:
    """A call to transformers' generate."""

    given: dict[str, Any]  # its keywords, without the prompt
    digits: Digits | None = None
    seed: int | None = None


def needs_loop(prompt: Prompt, merged: dict[str, Any], options: dict[str, Any]) -> bool:
    """True if transformers' generate has to write the text. It also handles processors in `standard`, and embeddings in
    `compatible` (processors do not see a prompt without ids). options: for `generate.generator.generate`."""
    asked = [merged[name] for name in STARTS_A_LOOP if merged.get(name) is not None]
    return (
        any(value is True or isinstance(value, Tensor) or value not in (False, 1) for value in asked)
        or merged.get("cache_implementation") not in (None, "dynamic", "static")
        or (options["mode"] == "standard" and options.get("logits_processor") is not None)
        or (options["mode"] == "compatible" and prompt.embeds is not None)
    )


def loop_call(
    model: Any,
    length: int,
    merged: dict[str, Any],
    options: dict[str, Any],
    criteria: Sequence[Callable[..., Tensor]] | None,
    streamer: BaseStreamer | None,
    watch: Sequence[Watch],
) -> LoopCall:
    """Build the call to transformers' generate; length: prompt length. Raises `UserError` if its loops cannot do it."""
    written = "nothing with beams, scores or a cache of transformers, whose loops know only ids"
    for name in ("decode_rule", "eps_truncation", "generator", "number_first", "used_rows", "stop_strings"):
        if merged.get(name):
            raise UserError(name, merged[name], written)
    if watch or isinstance(streamer, NumberStreamer):
        raise UserError("streamer", "a NumberStreamer", written)
    if model.model.beside is not None and merged.get("num_beams", 1) > 1:
        raise UserError("num_beams", merged["num_beams"], "1: the part beside z only goes forward")
    Settings(mode=options["mode"], temperature=options.get("temperature"))
    names = (*BEAMS, *SEEN, *PLAIN, "cache_config", "num_return_sequences", "return_dict_in_generate")
    mode, room = options["mode"], model.config.max_position_embeddings - length
    drawn = options.get("do_sample", mode == "ovr")
    fields = {name: merged[name] for name in (*names, "max_time") if merged.get(name) is not None}
    fields |= {"max_new_tokens": max(0, min(options["max_new_tokens"], room)), "do_sample": drawn, "mode": mode}
    if drawn:
        fields |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # they are among the processors
    with refused_by_transformers():
        config = GenerationConfig(**fields)
    config.eos_token_id = merged.get("eos_token_id", model.config.eos_token_id) or None
    found = {
        "generation_config": config,
        "logits_processor": options.get("logits_processor"),
        "stopping_criteria": criteria,
        "streamer": streamer,
        "position_ids": merged.get("position_ids"),
        model.cache_name: merged.get("cache", merged.get("past_key_values")),
    }
    given = {name: value for name, value in found.items() if value is not None}
    return LoopCall(given, merged.get("digits"), merged.get("seed"))
