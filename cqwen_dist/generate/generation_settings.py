"""Settings of a `generate` call, with checks of settings and prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.modes import MODES, Draws, Mode, ModeName, find_mode
from cqwen_dist.generate.numbers import Digits, check_digits
from cqwen_dist.heads.intervals import Intervals

# Settings that draw words elsewhere, and the values with which they have no effect.
DRAWING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def mode_as_asked(asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(mode, options) of a call that names no mode, as callers of transformers and of OpenAI's protocol mean it.

    do_sample, temperature, top_p or top_k draw from softmax, in mode compatible. Without them the mode is standard, and
    do_sample False or a temperature of 0 leaves them out: nothing is drawn.
    """
    drawn = asked.get("do_sample")
    if drawn is None:
        drawn = any(asked.get(name) not in (None, neutral) for name, neutral in DRAWING.items())
    if drawn and asked.get("temperature") != 0:
        return "compatible", {**asked, "do_sample": drawn}
    return "standard", {name: value for name, value in asked.items() if name not in ("do_sample", *DRAWING)}


@dataclass(frozen=True)
class Settings:
    """The keywords of `generate.generator.generate` after the prompt.

    Raises `UserError` for an unknown mode, values out of range, and a temperature in a mode without temperature.
    """

    mode: ModeName = "standard"  # a name of `generate.modes.MODES`, or two (`mode_names`)
    max_new_tokens: int = 64  # the end of the model's context also ends a text
    eos_token_id: int | Sequence[int] | None = None  # end token ids; None: the ids of the config; []: no end
    pad_token_id: int | None = None  # fills ended rows; None: the id of the config, or the first eos, or 0
    # For `compatible` and `ovr`: whether to sample (None: only `ovr`), and (ids [B,t], logits [B,V]) -> logits, which
    # includes the temperature.
    do_sample: bool | None = None
    logits_processor: Callable[[Tensor, Tensor], Tensor] | None = None
    # In modes that draw an individual or the noise: factor of the scale in draws (1: the inferred law, 0: no draw). The
    # same for what words read; "auto": the temperature times the model's own factor (`heads.word_temperature`).
    temperature: float | None = None
    word_temperature: float | Literal["auto"] = "auto"
    decode_rule: Literal["ovr", "loc"] | None = None  # ranks words by P or by loc_S; None: the default of the mode
    # Ends a text before the first word or number that is more doubtful than this share of the held-out ones
    # (`Intervals.most_doubt`); None: never.
    abstain: float | None = None
    eps_truncation: float = 0.0  # clamps uniforms to this distance from 0 and 1, which cuts the far tails
    # Source of random numbers: one of the two, or torch's global state. Rows draw independently.
    generator: torch.Generator | None = None
    seed: int | None = None
    use_cache: bool = True
    # "static": steps of fixed shapes, compiled on CUDA; "dynamic" or None: a growing cache
    cache_implementation: Literal["dynamic", "static"] | None = None
    compile_config: Any = None  # transformers' CompileConfig for a static cache; if given, it also compiles on a CPU
    disable_compile: bool = False
    number_first: bool = False  # force <NUM> as the first word
    digits: Digits | None = None  # digits of written and fed back numbers (`generate.numbers.shown`); None: all
    # Words from this row on are never written, except in `compatible`. None: the config's value.
    used_rows: int | None = None

    def __post_init__(self) -> None:
        mode, seed = find_mode(self.mode), self.seed
        if self.digits is not None:
            check_digits(self.digits)
        for key, fits, allowed in (
            ("eps_truncation", 0.0 <= self.eps_truncation < 0.5, "0 or more, below 0.5"),
            ("abstain", self.abstain is None or 0.0 < self.abstain < 1.0, "a share of answers above 0, below 1"),
            ("max_new_tokens", self.max_new_tokens >= 0, "0 or more"),
            ("decode_rule", self.decode_rule in (None, "ovr", "loc"), "ovr, loc"),
            ("cache_implementation", self.cache_implementation in (None, "dynamic", "static"), "dynamic, static"),
            ("cache_implementation", self.use_cache or not self.static, "dynamic if use_cache is false"),
            ("used_rows", self.used_rows is None or self.used_rows >= 1, "1 or more"),
            ("seed", seed is None or self.generator is None, "a seed or a generator, not both"),
            ("seed", seed is None or -(2**63) <= seed < 2**64, "a number of 64 bits"),
        ):
            if not fits:
                raise UserError(key, getattr(self, key), allowed)
        self._check_temperatures(mode)

    def _check_temperatures(self, mode: Mode) -> None:
        """Raises `UserError` for a temperature out of range, or in a mode without it."""
        check_temperature(self.temperature)
        if self.temperature not in (None, 1.0) and mode.drawn is None and mode.numbers is None:
            having = ", ".join(name for name, other in MODES.items() if other.draws is not False)
            elsewhere = f"none in mode {self.mode}, or a mode out of {having}"
            raise UserError("temperature", self.temperature, "in logits_processor" if mode.has_logits else elsewhere)
        if self.word_temperature == "auto":
            return
        check_temperature(self.word_temperature, "word_temperature")
        if mode.drawn is None:
            having = ", ".join(name for name, other in MODES.items() if other.drawn is not None)
            raise UserError("word_temperature", self.word_temperature, f"auto, or a mode out of {having}")

    @property
    def static(self) -> bool:
        """Whether steps have fixed shapes."""
        return self.cache_implementation == "static"

    def most_doubt(self, intervals: Intervals) -> dict[str, float]:
        """The largest doubt of an answer by kind, "words" and "numbers"; {} if all are given. Raises `UserError`."""
        if self.abstain is None:
            return {}
        if not any(map(len, intervals.doubts.values())):
            raise UserError("abstain", self.abstain, "nothing: no held-out texts have set its level (data.eval)")
        return {kind: intervals.most_doubt(kind, self.abstain) for kind in ("words", "numbers")}

    def draws(self, device: torch.device, known: Intervals) -> Draws:
        """The randomness of one generation. known: what the model's held-out texts have calibrated."""
        own, cut = 1.0 if self.temperature is None else self.temperature, self.eps_truncation
        words = known.word_draws(own, cut) if self.word_temperature == "auto" else (self.word_temperature, cut)
        source = self.generator if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return Draws(source, own, cut, words if words != (own, cut) else None, Draws(source, own, cut))

    def ends(self, config: Any) -> list[int]:
        """The end token ids. config: the model's."""
        ids = config.eos_token_id if self.eos_token_id is None else self.eos_token_id
        if ids is None:
            return []
        return [ids] if isinstance(ids, int) else list(ids)

    def padding(self, config: Any) -> int:
        """The id that fills ended rows. config: the model's; old ones use -1 for none.

        Raises `UserError` for an id outside of the vocabulary.
        """
        candidates = (self.pad_token_id, config.pad_token_id, *self.ends(config))
        found = next((int(token) for token in candidates if token is not None and token >= 0), 0)
        if found >= config.vocab_size:
            raise UserError("pad_token_id", found, f"an id below {config.vocab_size}")
        return found


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call."""

    ids: Tensor  # [B,T]
    values: Tensor | None = None  # [B,T]
    mask: Tensor | None = None  # [B,T]
    embeds: Tensor | None = None  # [B,T,H]: read instead of the ids
    hidden: int = 0  # T if there are only embeds: texts are then returned without these positions

    def copies(self, each: int) -> Prompt:
        """Each row `each` times."""
        given = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        parts: dict[str, Any] = {name: part.repeat_interleave(each, 0) for name, part in given.items()}
        return replace(self, **parts)

    @classmethod
    def of(cls, model: Any, ids: Any, values: Any, mask: Any, embeds: Tensor | None) -> Prompt:
        """The prompts of a call of `CausalQwenForCausalLM.generate`; without any, the token that begins a text.

        Also takes lists, which a tokenizer returns without return_tensors. Raises `UserError` for rows of different
        lengths, and for no prompt if no token begins a text.
        """
        hidden = 0
        if ids is None and embeds is not None:
            hidden = embeds.shape[1]
            ids = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
        elif ids is None:
            begin = getattr(model.generation_config, "bos_token_id", None)
            if begin is None:
                raise UserError("prompt", None, "token ids [B,T], int64: this model has no token that begins a text")
            ids = torch.tensor([[begin]], device=model.device)
        if not isinstance(ids, Tensor):
            kinds = zip((ids, values, mask), (torch.int64, torch.float64, torch.int64), strict=True)
            try:
                ids, values, mask = (
                    None if rows is None else torch.atleast_2d(torch.tensor(rows, dtype=kind, device=model.device))
                    for rows, kind in kinds
                )
            except (TypeError, ValueError):
                allowed = "rows of one length: tokenizer(texts, padding=True, ...)"
                raise UserError("prompt", "no tensor", allowed) from None
        if embeds is not None and ids.shape != embeds.shape[:2]:
            raise UserError("inputs_embeds", list(embeds.shape), f"the shape of the ids, {list(ids.shape)}, and H")
        return cls(ids, values, mask if embeds is None or mask is not None else torch.ones_like(ids), embeds, hidden)


def check_temperature(temperature: float | None, name: str = "temperature") -> None:
    """Raises `UserError` unless the temperature is None, or finite and at least 0."""
    if temperature is not None and not (isinstance(temperature, Real) and 0.0 <= temperature < math.inf):
        raise UserError(name, temperature, "a number >= 0 (0: greedy)" + ", or auto" * (name != "temperature"))


def check_prompt(model: Any, ids: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
    """Check a prompt; raises as documented in `generate`. model: a `CausalQwenModel`."""
    v, context = model.action.vocab_size, model.config.base_config.max_position_embeddings
    if model.action.cls_weight.shape[0] != v:
        raise ValueError(f"the head holds {model.action.cls_weight.shape[0]} of {v} words here: gather it first")
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
        _check_padding(mask.bool(), model.beside is not None)


def _check_padding(real: Tensor, left_only: bool) -> None:
    """Each row of real [B,T] bool has a token and ends with one. left_only: nothing is left out in between."""
    if not bool(real.any(1).all()):
        raise UserError("prompt", "no tokens", "at least one token in every row")
    if not bool(real[:, -1].all()):
        raise UserError("attention_mask", "padding at the end", "padding on the left")
    if left_only and bool((real[:, 1:] < real[:, :-1]).any()):
        raise UserError("attention_mask", "padding after a token", "padding on the left only with model.wide")
