"""Beams and scores by transformers' loops, which pass ids only; this module adds the values of numbers.

A number's value is a function of the text before it. `LoopNumbers` keeps, for each row and position, the value that a
number there would have. When a loop feeds `<NUM>` back, the value is looked up.

Shape letters: B prompts, R rows (B times the beams), T prompt positions, t positions so far, w positions in one call.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from cqwen_dist.batch import positions_in
from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.generation_settings import Prompt, Settings, check_prompt
from cqwen_dist.generate.generator import Watch, numbers_of
from cqwen_dist.generate.modes import mode_names
from cqwen_dist.generate.numbers import POWERS, Digits, GeneratedNumbers, written_values
from cqwen_dist.generate.streaming import NumberStreamer
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.numerals import only
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy

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


def needs_loop(prompt: Prompt, merged: dict[str, Any], options: dict[str, Any]) -> bool:
    """True if transformers' generate has to write the text. It also handles processors in `standard`, and embeddings in
    `compatible` (processors do not see a prompt without ids). options: for `generate.generator.generate`."""
    asked = [merged[name] for name in STARTS_A_LOOP if merged.get(name) is not None]
    mode, _ = mode_names(options["mode"])
    return (
        any(value is True or isinstance(value, Tensor) or value not in (False, 1) for value in asked)
        or merged.get("cache_implementation") not in (None, "dynamic", "static")
        or (mode == "standard" and options.get("logits_processor") is not None)
        or (mode == "compatible" and prompt.embeds is not None)
    )


def loop_call(
    model: Any,
    length: int,
    merged: dict[str, Any],
    options: dict[str, Any],
    criteria: Sequence[Callable[..., Tensor]] | None,
    streamer: BaseStreamer | None,
    watch: Sequence[Watch],
) -> dict[str, Any]:
    """The keywords of transformers' generate but for the prompt, of `length`. Raises `UserError` if its loops cannot do
    it."""
    written = "nothing with beams, scores or a cache of transformers, whose loops know only ids"
    mode, apart = mode_names(options["mode"])
    asked = {**merged, "numbers": apart, "a model of numbers only": not model.config.learns_words}
    refused = (
        "a model of numbers only",
        "abstain",
        "decode_rule",
        "eps_truncation",
        "generator",
        "number_first",
        "numbers",
        "used_rows",
    )
    for name in (*refused, "stop_strings"):
        if asked.get(name):
            raise UserError(name, asked[name], written)
    if watch or isinstance(streamer, NumberStreamer):
        raise UserError("streamer", "a NumberStreamer", written)
    if model.model.beside is not None and merged.get("num_beams", 1) > 1:
        raise UserError("num_beams", merged["num_beams"], "1: the part beside z only goes forward")
    Settings(**{name: options[name] for name in ("mode", "temperature", "word_temperature") if name in options})
    names = (*BEAMS, *SEEN, *PLAIN, "cache_config", "num_return_sequences", "return_dict_in_generate")
    room = model.config.max_position_embeddings - length
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
    return {name: value for name, value in found.items() if value is not None}


class LoopNumbers:
    """Values of the numbers in a loop's rows."""

    def __init__(self, model: Any, prompt: Prompt, mode: str, digits: Digits | None) -> None:
        """model: a `CausalQwenModel`. mode, digits: as in `Settings`."""
        ids, values, mask = prompt.ids, prompt.values, prompt.mask
        self.model, self.mode, self.digits, self.hidden = model, mode, digits, prompt.hidden
        self.prompt = torch.zeros_like(ids, dtype=torch.float64) if values is None else values.double()
        self.mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        self.ids = self.first = ids
        self.values = self.prompt
        self.following = self.prompt[:, :0]  # [R,t]: the value of a number that follows this position
        self.intervals, self.powers = Intervals.from_dict(model.config.calibration), POWERS.to(ids.device)

    def of(self, ids: Tensor) -> Tensor:
        """Values [R,t] for these rows. Each continues a row of the previous call."""
        each, start = len(ids) // len(self.prompt), self.prompt.shape[1]
        if self.hidden:
            ids = torch.cat([self.first[:, : self.hidden].repeat_interleave(each, 0), ids], 1)
        if not self.following.shape[1]:
            self.following = self.prompt.new_zeros(ids.shape)
        elif each > 1:
            self.following = self.following[self._places(ids, each)]
        end, number = ids.shape[1], ids[:, start:] == self.model.config.num_token_id
        known = nn.functional.pad(self.following, (0, max(0, end - self.following.shape[1])))  # a draft has no number
        written = known[:, start - 1 : end - 1].where(number, 0.0)
        self.values = torch.cat([self.prompt.repeat_interleave(each, 0), written], 1)
        self.ids = ids
        return self.values

    def _places(self, ids: Tensor, each: int) -> Tensor:
        """Indices [R] of the rows in the previous call that these continue. Beams with equal ids have equal values."""
        b, length = len(self.prompt), self.ids.shape[1]
        new, old = ids[:, :length].view(b, each, 1, length), self.ids.view(b, 1, each, length)
        same = (new == old).all(-1).int().argmax(-1)
        return (same + each * torch.arange(b, device=ids.device).unsqueeze(1)).flatten()

    def note(self, u: Cauchy) -> None:
        """Store the values that numbers after the last w positions would have, from U [R,w,C]."""
        action, head = self.model.action, self.model.action.number_head
        (rows, end), width, start = self.ids.shape, u.loc.shape[1], self.mask.shape[1]
        real = nn.functional.pad(self.mask, (0, end - start), value=True).repeat_interleave(rows // len(self.mask), 0)
        number = (self.ids == self.model.config.num_token_id) & real
        at = torch.arange(rows * end, device=number.device).view(rows, end)[:, end - width :].flatten()
        memory = head.memory(self.ids, number, self.values, positions_in(real), at).view(rows, width, -1)
        with at_hand(action):
            found = head.decide(Cauchy(*action.add_noise(u)), memory, self.intervals.bar)
        value = written_values(found, self.model.target, self.intervals, self.digits, self.powers)
        self.following = torch.cat([self.following[:, : end - width], value], 1)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """A logits processor: inside a numeral only its next character may follow (`data.keep_digits`)."""
        real = nn.functional.pad(self.mask, (0, self.ids.shape[1] - self.mask.shape[1]), value=True)
        number = (self.ids == self.model.config.num_token_id) & real.repeat_interleave(len(ids) // len(self.mask), 0)
        last = torch.tensor([self.ids.shape[1] - 1], device=ids.device)
        return only(scores, self.model.features.embedding.next_digits(number, self.values, last))


class NumberGenerationMixin(GenerationMixin):
    """`GenerationMixin` that feeds numbers back with their values. numbers: the `LoopNumbers` of a call."""

    def prepare_inputs_for_generation(  # type: ignore[override, unused-ignore]
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        numeric_values: Tensor | None = None,
        numbers: LoopNumbers | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The next model inputs, with the values at these positions and the mode that the logits belong to."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if numbers is not None:
            numeric_values, inputs["mode"] = numbers.of(input_ids), numbers.mode
        if numeric_values is not None:
            read = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            now = numeric_values[:, -read.shape[1] :]
            inputs["numeric_values"] = now.clone(memory_format=torch.contiguous_format)  # equal strides at any length
        return inputs

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **given: Any) -> Any:
        if (numbers := model_kwargs.get("numbers")) is not None:
            numbers.note(Cauchy(outputs.loc_U, outputs.scale_U))
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **given)

    model: Any

    def written_by_loop(self: Any, prompt: Prompt, call: Any) -> Any:
        """Run transformers' generate. call: of `generate.hugging_face`. Raises `UserError` if it refuses an option."""
        on_gpu = [self.device] if self.device.type == "cuda" else []
        shown = {"inputs_embeds": prompt.embeds} if prompt.embeds is not None else {}
        if not prompt.hidden:
            shown["input_ids"] = prompt.ids
        check_prompt(self.model, prompt.ids, prompt.values, prompt.mask)
        config, seed = call.loop["generation_config"], call.options.get("seed")
        numbers = LoopNumbers(self.model, prompt, config.mode, call.options.get("digits"))
        if self.config.digit_rows:
            processors = call.loop.get("logits_processor") or []
            call.loop["logits_processor"] = LogitsProcessorList([*processors, numbers])
        if config.use_cache in (None, True) and config.cache_implementation in (None, "dynamic"):
            shown[self.cache_name] = self._cache_of(None, True)  # transformers' own does not know the base's layers
        writer = copy.copy(self)  # another thread may read the config of the model meanwhile
        writer.generation_config = GenerationConfig()  # the call's is whole
        with torch.random.fork_rng(on_gpu, enabled=seed is not None), refused_by_transformers():
            if seed is not None:
                torch.manual_seed(seed)
            return GenerationMixin.generate(writer, attention_mask=prompt.mask, numbers=numbers, **shown | call.loop)

    def numbers_in(self, sequences: Tensor, prompt: Prompt, call: Any) -> GeneratedNumbers:
        """The numbers in the generated sequences, aligned with them [R,t]. Reads the sequences once more."""
        whole = prompt.copies(len(sequences) // len(prompt.ids))
        ids = torch.cat([whole.ids[:, : prompt.hidden], sequences], 1)
        config = call.loop["generation_config"]
        ends = [] if config.eos_token_id is None else config.eos_token_id
        tokens = {"digits": call.options.get("digits"), "eos_token_id": ends, "pad_token_id": config.pad_token_id}
        return numbers_of(self.model, ids, whole, **tokens).until(None, prompt.hidden)
