"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number goes back in as (<NUM>, its value as written), a word as (word, 0), so ids and values stay aligned.
Letters: B rows, T prompt positions, T' positions at the end, C causal dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import is_accelerate_available

from cqwen_dist.generate.generation_settings import Settings, check_prompt
from cqwen_dist.generate.modes import Action, Draws, Options, best, find_mode
from cqwen_dist.generate.numbers import GeneratedNumbers, empty_numbers
from cqwen_dist.intervals import Intervals
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import row_sizes
from cqwen_dist.ops.ovr.topk import prob_at
from cqwen_dist.targets import TargetTransform


class Model(Protocol):
    """What this folder uses of `model.CausalQwenModel`."""

    @property
    def action(self) -> Any: ...  # an `Action`
    @property
    def target(self) -> TargetTransform: ...
    @property
    def config(self) -> Any: ...  # a `CausalQwenConfig`
    def infer(self, *args: Any, **context: Any) -> Cauchy: ...


# Called after every step with the ids [B,t] and their numbers; returns the rows that end here [B] bool, or None.
Watch = Callable[[Tensor, GeneratedNumbers], Tensor | None]


@torch.no_grad()
def generate(
    model: Model,
    input_ids: Tensor,
    numeric_values: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    watch: Sequence[Watch] = (),
    **settings: Any,
) -> tuple[Tensor, GeneratedNumbers]:
    """Continue prompts.

    input_ids [B,T] int64; numeric_values [B,T], raw unit, 0 at text (default: all text); attention_mask [B,T], 0 at
        the padding, which is on the left.
    watch: called after every step with all that is written; may end rows.
    settings: the fields of `generate.generation_settings.Settings`, such as mode, max_new_tokens, temperature, seed.

    Returns prompt + continuation [B,T'] int64 and their `GeneratedNumbers`. Raises `UserError` for what `Settings`
    refuses, an empty prompt, one longer than the context, ids out of the vocabulary, values that are not finite, and
    padding that is not on the left; ValueError if this process holds only a part of the head.
    """
    chosen = Settings(**settings)
    check_prompt(model, input_ids, numeric_values, attention_mask)
    text = _Continuation(model, chosen, input_ids, numeric_values, attention_mask)
    with at_hand(model.action):
        choice = _Choice(model, chosen, input_ids.device, many=text.total > text.end + 1)
        while text.end < text.total and not bool(text.done.all()):
            text.append(choice(text.read(), text.ids[:, : text.end]))
            for look in watch:
                ended = look(text.ids[:, : text.end], text.numbers.until(text.end))
                if ended is not None:
                    text.done = text.done | ended.to(text.done.device)
    return text.ids[:, : text.end], text.numbers.until(text.end)


class _Token(NamedTuple):
    """The next token of every row."""

    word: Tensor  # [B]
    y: Cauchy  # [B], in the target's unit
    p_num: Tensor  # [B], P(<NUM>)
    p_word: Tensor  # [B], P of the word
    kind: Tensor | None  # [B], the type of the number, if the model has types
    more: Cauchy | None  # [B,R-1], its further values, if the model has them


class _Continuation:
    """The prompts and their continuations, in buffers of the final length, and the model's cache."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        input_ids: Tensor,
        numeric_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        config, device = model.config, input_ids.device
        base = config.base_config
        b, prompt = input_ids.shape
        self.model = model
        self.digits = settings.digits
        self.num_token_id, self.pad_token_id = int(config.num_token_id), settings.padding(base)
        self.eos = torch.tensor(settings.ends(base), dtype=torch.int64, device=device)
        self.total = min(prompt + settings.max_new_tokens, max(prompt, base.max_position_embeddings))
        self.start, self.end = 0, prompt  # [start, end): what the model reads next
        self.ids = torch.full((b, self.total), self.pad_token_id, dtype=torch.int64, device=device)
        self.ids[:, :prompt] = input_ids
        values = torch.zeros((b, self.total), dtype=torch.float64, device=device)
        if numeric_values is not None:
            values[:, :prompt] = numeric_values.to(values)
        self.mask = torch.ones((b, self.total), dtype=torch.bool, device=device)
        if attention_mask is not None:
            self.mask[:, :prompt] = attention_mask.bool()
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        intervals = Intervals.from_dict(config.calibration)
        self.numbers = empty_numbers(values, model.target, intervals, config.number_types, config.more_values)
        self.done = torch.zeros(b, dtype=torch.bool, device=device)  # rows that have ended
        self.cache = DynamicCache(config=base) if settings.use_cache else None

    def read(self) -> Cauchy:
        """U [B,C] at each row's last position."""
        new = slice(self.start, self.end)
        b, width = len(self.ids), self.end - self.start
        return self.model.infer(
            self.ids[:, new],
            self.numbers.values[:, new],
            self.mask[:, : self.end],
            position_ids=self.positions[:, new],
            past_key_values=self.cache,
            keep=torch.arange(1, b + 1, device=self.ids.device) * width - 1,  # the last position of each row
        )

    def append(self, token: _Token) -> None:
        """Write one position; a row that has ended gets padding."""
        numbers, at, device = self.numbers, self.end, self.ids.device
        word, y = token.word.to(device), Cauchy(token.y.loc.double().to(device), token.y.scale.double().to(device))
        number = (word == self.num_token_id) & ~self.done
        self.ids[:, at] = torch.where(self.done, self.pad_token_id, word)
        numbers.values[:, at] = self.model.target.inverse(y.loc).where(number, 0.0)
        numbers.loc[:, at], numbers.scale[:, at] = y.loc.where(number, 0.0), y.scale.where(number, 0.0)
        numbers.p_num[:, at] = token.p_num.to(device).where(~self.done, math.nan)
        numbers.p_word[:, at] = token.p_word.to(device).where(~self.done, math.nan)
        numbers.generated[:, at] = number
        if token.kind is not None and numbers.kinds is not None:
            numbers.kinds[:, at] = token.kind.to(device)
        if token.more is not None and numbers.more is not None:
            for kept, new in zip(numbers.more, token.more, strict=True):
                kept[:, at] = new.double().to(device)
        if self.digits is not None:
            for row in number.nonzero()[:, 0].tolist():
                numbers.values[row, at] = numbers.written(row, at, self.digits)
        self.done = self.done | torch.isin(word, self.eos)
        self.start, self.end = (0 if self.cache is None else at), at + 1


class _Choice:
    """Chooses words and numbers as the mode does. many: more than one token comes, so `row_sizes` pays off."""

    def __init__(self, model: Model, settings: Settings, device: torch.device, many: bool) -> None:
        self.action: Action = model.action
        self.mode, self.num_token_id = find_mode(settings.mode), int(model.config.num_token_id)
        temperature = 1.0 if settings.temperature is None else settings.temperature
        self.draws = Draws(settings.generator_on(device), temperature, settings.eps_truncation)
        rank_by = settings.decode_rule or self.mode.rank_by
        by_p = self.mode.choose is best and rank_by == "ovr"
        self.options = Options(
            used_rows=int(model.config.used_rows) if settings.used_rows is None else settings.used_rows,
            rank_by=rank_by,
            do_sample=settings.do_sample,
            processors=_logits_processor(settings, model.config),
            sizes=row_sizes(self.action.cls_weight) if many and by_p else None,
        )

    def __call__(self, u: Cauchy, ids: Tensor) -> _Token:
        """The next token by U [B,C], for rows whose text so far is ids [B,t]."""
        action, home = self.action, self.action.cls_weight.device
        u_prime = self.mode.law(action, Cauchy(u.loc.to(home), u.scale.to(home)), self.draws)
        seen = action.word_part(u_prime)
        word = self.mode.choose(action, seen, self.draws, self.options, ids.to(home))
        kind = None if action.types is None else action.number_type(u_prime)
        more = None
        if action.reg_weight.ndim > 1 and kind is None:
            every = action.values(u_prime)
            more = Cauchy(every.loc[:, 1:], every.scale[:, 1:])
        return _Token(word, action.value(u_prime), *_probs(action, seen, self.num_token_id, word), kind, more)


def _logits_processor(settings: Settings, config: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The caller's processor of `compatible`; rows that were added to the base's vocabulary are masked first."""
    given, used = settings.logits_processor, int(config.used_rows)
    if not config.added_rows:
        return given

    def masked(ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.where(torch.arange(logits.shape[1], device=logits.device) < used, -math.inf)
        return logits if given is None else given(ids, logits)

    return masked


def _probs(action: Action, u: Cauchy, num_token_id: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """P of <NUM> and of each row's own word: [B] float64 each."""
    at = torch.cat([words.new_tensor([num_token_id]), words])
    p = prob_at(u.to(action.cls_weight.dtype), action.word_head(), at)
    return p[:, 0].double(), p[:, 1:].diagonal().double()


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, weights that accelerate offloads to a disk or the CPU are on the module's own device."""
    with ExitStack() as stack:
        if is_accelerate_available():  # without it nothing is offloaded
            from accelerate.utils import align_module_device

            for part in module.modules():
                stack.enter_context(align_module_device(part))
        yield
