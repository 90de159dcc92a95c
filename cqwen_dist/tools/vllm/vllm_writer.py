"""vLLM's engine as a writer of texts with numbers, one for each request; vLLM runs them together."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from cqwen_dist.checkpoint.trained import exported_tokenizer, is_exported
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.trainable import feature_group
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.continuation import Written, end_ids, written_of
from cqwen_dist.generate.generation_settings import mode_as_asked
from cqwen_dist.generate.hugging_face import NEUTRAL, OF_LOGITS, SAMPLING
from cqwen_dist.generate.modes import ModeName, mode_names
from cqwen_dist.generate.numbers import Digits, GeneratedNumbers, check_digits, empty_numbers
from cqwen_dist.generate.streaming import NumberStreamer, ends_at
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.numerals import given_digits
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.configuration import CausalQwenConfig

MODES = ("standard", "ovr", "compatible")
PENALTY = "repetition_penalty"
IN_VLLM = (PENALTY, "min_p")  # options with one name in transformers and vLLM, besides `SAMPLING`


class VllmWriter:
    """An exported folder in vLLM. It can replace the model in `end_ids`, which only reads end tokens.

    all: the writers of this engine, this one first, then those of the further folders.
    """

    engine: Any  # vLLM's
    params: Any  # its `SamplingParams`
    context: int  # most tokens of a text

    def __init__(self, folder: Path, further: Sequence[Path] = (), **options: Any) -> None:
        """further: exports of other runs on the same base. options: of vLLM's `AsyncEngineArgs`. Raises `UserError` for
        a folder that is no exported model, and for another base."""
        self._read(folder, 0)
        self.all = [self, *(copy.copy(self)._read(path, place) for place, path in enumerate(further, 1))]
        for other in self.all[1:]:
            _refuse_other_base(self, other)
        if find_spec("vllm") is None:
            raise UserError("--engine", Said("vllm, which is not installed"), "pip install 'cqwen-dist[vllm]'")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second model runner has other logits processors
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        configs = [(str(other.folder), other.config.to_dict()) for other in self.all[1:]]
        own: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": str(self.config.dtype).removeprefix("torch.")}
        own |= {"hf_overrides": {"calibration": self.config.calibration, "further": configs}}
        engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **{**own, **options}))
        for each in self.all:
            each.engine, each.params, each.context = engine, SamplingParams, int(engine.model_config.max_model_len)

    def _read(self, folder: Path, run: int) -> VllmWriter:
        if not is_exported(folder):
            raise UserError("CHECKPOINT", str(folder), "a folder of `cqwen export`: vLLM loads no run")
        self.folder, self.run, self.config = folder, run, CausalQwenConfig.from_pretrained(folder)
        self.tokenizer = exported_tokenizer(folder, self.config)
        self.generation_config = GenerationConfig()
        with suppress(OSError):  # the folder has none
            self.generation_config = GenerationConfig.from_pretrained(folder)
        self.head: Any = None  # what `empty_numbers` reads of a number head
        return self

    def close(self) -> None:
        """End vLLM's processes."""
        self.engine.shutdown()

    async def write(
        self,
        prompt: str,
        *,
        mode: ModeName | None = None,
        begin: bool = True,
        max_new_tokens: int = 64,
        digits: Digits = "auto",
        stop: Sequence[str] = (),
        streamer: NumberStreamer | None = None,
        until: float = math.inf,
        **drawing: Any,
    ) -> tuple[Written, int]:
        """(the continuation of a prompt, tokens of the prompt), as `continue_text`.

        until: `time.monotonic` at which the text ends. drawing: do_sample, seed, temperature, top_k, top_p; a seed
        repeats a text in this engine, `generate` draws others. Raises `UserError`.
        """
        check_digits(digits)
        if mode is None:
            mode, drawing = mode_as_asked(drawing)
        words, apart = mode_names(mode)
        mode = words if apart is None else mode
        given = self.tokenizer.encode(prompt, begin)
        start, room = len(given.ids), self.context - len(given.ids)
        if not 0 < start < self.context:
            raise UserError("prompt", f"{start} tokens", f"1 to {self.context - 1}")
        # A model of numbers only answers with one
        most = max_new_tokens if self.config.learns_words else min(1, max_new_tokens)
        ends, total = end_ids(self, self.tokenizer), start + min(most, room)
        key = uuid.uuid4().hex
        numbers = [value for token, value in zip(*given, strict=True) if token == self.tokenizer.num_token_id]
        params = self.params(
            max_tokens=total - start,
            stop_token_ids=ends,
            detokenize=False,
            extra_args={"key": key, "numbers": numbers, "digits": digits, "mode": mode, "run": self.run},
            **sampling(mode, drawing, self.generation_config),
        )
        text = await self._row(given, total)
        ended = ends_at(stop, self.tokenizer, start, digits) if stop else None
        end, outputs = start, self.engine.generate({"prompt_token_ids": given.ids}, params, key)
        try:
            async for output in outputs:  # each has all ids
                new = list(output.outputs[0].token_ids)[end - start :]
                text.ids[0, end : end + len(new)] = torch.tensor(new)
                if (ended or streamer) and self.tokenizer.num_token_id in new:
                    text.take(await self._numbers(key), end, end + len(new))
                end, over = _looked(text, start, end, len(new), ended, streamer)
                if over or time.monotonic() > until:
                    break
        finally:
            await outputs.aclose()  # ends the request, if it goes on
            found = await asyncio.shield(self._numbers(key, done=True))
        text.take(found, start, end)
        if streamer is not None:
            streamer.end()
        numbers_of_text = text.numbers.until(end)
        return written_of(self.tokenizer, prompt, text.ids, numbers_of_text, 0, start, end, ends, digits, stop), start

    async def _numbers(self, key: str, done: bool = False) -> list[list[float]]:
        """The numbers decided for a request since the last call: one call to the worker, between two steps."""
        return (await self.engine.collective_rpc("numbers_of", args=(key, done)))[0]

    async def _row(self, given: Any, total: int) -> _Row:
        if self.head is None:
            (about, *_) = await self.engine.collective_rpc("number_head", args=(self.run,))
            self.head = SimpleNamespace(**about, target=TargetTransform(**self.config.target))
        values = torch.zeros(1, total, dtype=torch.float64)
        values[0, : len(given.values)] = torch.tensor(given.values, dtype=torch.float64)
        ids = torch.zeros(1, total, dtype=torch.int64)
        ids[0, : len(given.ids)] = torch.tensor(given.ids)
        return _Row(ids, empty_numbers(values, self.head, Intervals.from_dict(self.config.calibration)), self.tokenizer)


def _refuse_other_base(one: VllmWriter, other: VllmWriter) -> None:
    """Raises `UserError` unless the bases of two exported folders are equal, their tensors to the bit."""
    allowed = "exports of runs on one base, in one precision, without --merge"
    shape, known = other.config.base, one.config.base
    odd = sorted(key for key in shape.keys() & known.keys() - {"transformers_version"} if shape[key] != known[key])
    if other.config.num_token_id != one.config.num_token_id:
        odd.append("num_token_id")
    if not odd:
        with ExitStack() as files:
            found, wanted = (_base_tensors(each.folder, files) for each in (other, one))
            odd = sorted(found.keys() ^ wanted.keys()) or [n for n in wanted if not _equal(found[n](), wanted[n]())]
    if odd:
        raise UserError("--adapter", Said(f"another {odd[0]} in {other.folder}"), allowed)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _base_tensors(folder: Path, files: ExitStack) -> dict[str, Callable[[], Tensor]]:
    """How to read each tensor of an exported folder that is the base's, by its name without adapters."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path in folder.glob("*.safetensors"):
        opened = files.enter_context(safe_open(path, framework="pt"))
        for name in opened.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            _, inside, own = name.partition("model.features.")
            if inside and feature_group(own) is None:
                found[name.replace(".base_layer.", ".")] = partial(opened.get_tensor, name)
    return found


class _Row:
    """A text while it is written: ids [1,T'] and their numbers."""

    def __init__(self, ids: Tensor, numbers: GeneratedNumbers, tokenizer: NumericalAwareTokenizer) -> None:
        self.ids, self.numbers, self.num_token_id = ids, numbers, tokenizer.num_token_id
        self.keeps_digits = bool(tokenizer.digit_rows)
        self.facts: dict[int, list[float]] = {}  # by position; the worker may be ahead of the ids

    def take(self, found: list[list[float]], start: int, end: int) -> None:
        """Store the facts that `NumbersWorker.numbers_of` gave, and fill in those of the ids [start, end).

        A written word has no P there (nan).
        """
        numbers = self.numbers
        self.facts |= {int(at): facts for at, *facts in found}
        for at in range(start, end):
            value, loc, scale, p_num, which = self.facts[at]
            numbers.p_num[0, at] = p_num
            if int(self.ids[0, at]) != self.num_token_id:
                continue
            numbers.values[0, at], numbers.loc[0, at], numbers.scale[0, at] = value, loc, scale
            numbers.generated[0, at], numbers.p_word[0, at] = True, p_num
            if numbers.which is not None:
                numbers.which[0, at] = int(which)
        if self.keeps_digits:
            is_number = self.ids[:, :end] == self.num_token_id
            numbers.given[:, start:end] = given_digits(is_number, numbers.values[:, :end])[:, start:]


def _looked(
    text: _Row, start: int, end: int, new: int, ended: Callable[..., Tensor] | None, streamer: NumberStreamer | None
) -> tuple[int, bool]:
    """(the end of the text, whether a stop string ends it) after both have seen `new` further tokens."""
    for at in range(end + 1, end + new + 1) if ended or streamer else ():
        ids, numbers = text.ids[:, :at], text.numbers.until(at)
        if streamer is not None:
            streamer.put(ids, numbers, start)
        if ended is not None and bool(ended(ids, numbers)):
            return at, True
    return end + new, False


def sampling(mode: ModeName, drawing: Mapping[str, Any], base: GenerationConfig | None = None) -> dict[str, Any]:
    """vLLM's names for the options of a draw. Logits are log P, in mode compatible loc_S. Raises `UserError`.

    base: mode compatible has its settings if `drawing` has none, as in `generate`.
    """
    if mode not in MODES:
        raise UserError("mode", mode, f"{', '.join(MODES)}; others without vLLM")
    given = {name: value for name, value in drawing.items() if value is not None}
    for name, neutral in (("abstain", None), ("word_temperature", "auto")):
        if given.pop(name, neutral) != neutral:
            raise UserError(name, drawing[name], "nothing with vLLM; the plain engine does this")
    if mode == "compatible" and base is not None:
        given = _own_sampling(base) | given
    drawn = given.pop("do_sample", mode == "ovr" or (mode == "compatible" and not given.keys() <= {*IN_VLLM}))
    if mode == "standard" and given.keys() - {"seed"}:
        name = min(given.keys() - {"seed"})
        raise UserError(name, given[name], "none in mode standard, which draws nothing")
    greedy = {"temperature": 0.0, **{name: given[name] for name in given if name == PENALTY}}
    return {"temperature": 1.0, **given} if drawn else greedy


def _own_sampling(base: GenerationConfig) -> dict[str, Any]:
    own = {name: getattr(base, name, None) for name in (*SAMPLING, *OF_LOGITS)}
    own = {name: value for name, value in own.items() if value is not None and value != NEUTRAL.get(name)}
    if odd := sorted(own.keys() - {*SAMPLING, *IN_VLLM}):
        found = Said(f"compatible, with {odd[0]} in generation_config.json")
        raise UserError("mode", found, f"{', '.join(MODES)}; there only {', '.join((*SAMPLING, *IN_VLLM))}")
    return own
