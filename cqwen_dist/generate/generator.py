"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number goes back in as (<NUM>, its value as written), a word as (word, 0), so ids and values stay aligned.
Letters: B rows, T prompt positions, T' positions at the end, C causal dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import is_accelerate_available

from cqwen_dist.batch import recent_numbers
from cqwen_dist.generate.generation_settings import Settings, check_prompt
from cqwen_dist.generate.modes import Draws, Options, best, find_mode
from cqwen_dist.generate.numbers import GeneratedNumbers, empty_numbers
from cqwen_dist.intervals import Intervals
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import row_sizes
from cqwen_dist.ops.ovr.scores import prob_at

# Called after every step with the ids [B,t] and their numbers; returns the rows that end here [B] bool, or None.
Watch = Callable[[Tensor, GeneratedNumbers], Tensor | None]


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    numeric_values: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    watch: Sequence[Watch] = (),
    **settings: Any,
) -> tuple[Tensor, GeneratedNumbers]:
    """Continue prompts.

    model: a `CausalQwenModel`.
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
    with at_hand(model.action):
        text = _Continuation(model, chosen, input_ids, numeric_values, attention_mask)
        while text.end < text.total and not bool(text.done.all()):
            text.step()
            for look in watch:
                ended = look(text.ids[:, : text.end], text.numbers.until(text.end))
                if ended is not None:
                    text.done = text.done | ended.to(text.done.device)
    return text.ids[:, : text.end], text.numbers.until(text.end)


class _Continuation:
    """Prompts and continuations in buffers of the final length, the model's cache, and how the mode chooses."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        input_ids: Tensor,
        numeric_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        config, device = model.config, input_ids.device
        base = config.base_config
        b, prompt = input_ids.shape
        self.model, self.digits = model, settings.digits
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
        named = config.number_types, config.more_values
        self.numbers = empty_numbers(values, model.target, intervals, *named, copies=config.copies)
        is_number = (self.ids == self.num_token_id) & self.mask
        self.recent = recent_numbers(is_number, values, self.positions, config.copies)[:, prompt - 1]  # [B,copies]
        self.done = torch.zeros(b, dtype=torch.bool, device=device)  # rows that have ended
        self.cache = DynamicCache(config=base) if settings.use_cache else None
        # how words and numbers are chosen
        self.action, self.mode = model.action, find_mode(settings.mode)
        temperature = 1.0 if settings.temperature is None else settings.temperature
        self.draws = Draws(settings.generator_on(device), temperature, settings.eps_truncation)
        rank_by = settings.decode_rule or self.mode.rank_by
        # the sizes of rows pay off where they serve several tokens
        sized = self.mode.choose is best and rank_by == "ovr" and self.total > prompt + 1
        self.options = Options(
            used_rows=int(config.used_rows) if settings.used_rows is None else settings.used_rows,
            rank_by=rank_by,
            do_sample=settings.do_sample,
            processors=settings.logits_processor,
            added_from=int(config.used_rows) if config.added_rows else None,
            sizes=row_sizes(self.action.cls_weight) if sized else None,
        )

    def step(self) -> None:
        """Choose the next token of every row and write it; a row that has ended gets padding."""
        action, numbers, at, device = self.action, self.numbers, self.end, self.ids.device
        # what is new is read: U [B,C] at each row's last position
        new, width = slice(self.start, at), at - self.start
        u: Cauchy = self.model.infer(
            self.ids[:, new],
            numbers.values[:, new],
            self.mask[:, :at],
            position_ids=self.positions[:, new],
            past_key_values=self.cache,
            keep=torch.arange(1, len(self.ids) + 1, device=device) * width - 1,
        )
        # a word is chosen, on the head's device; p: P of <NUM> and of every row's word, of each row
        home = action.cls_weight.device
        u_prime = self.mode.law(action, u.to(home), self.draws)
        seen = action.word_part(u_prime)
        word = self.mode.choose(action, seen, self.draws, self.options, self.ids[:, :at].to(home))
        asked = torch.cat([word.new_tensor([self.num_token_id]), word])
        p = prob_at(seen.to(action.cls_weight.dtype), action.word_head(), asked).double().to(device)
        # the token is written, on the ids' device
        word, y = word.to(device), action.value(u_prime).to(torch.float64).to(device)
        number = (word == self.num_token_id) & ~self.done
        self.ids[:, at] = torch.where(self.done, self.pad_token_id, word)
        numbers.values[:, at] = self.model.target.inverse(y.loc).where(number, 0.0)
        numbers.loc[:, at], numbers.scale[:, at] = y.loc.where(number, 0.0), y.scale.where(number, 0.0)
        numbers.p_num[:, at] = p[:, 0].where(~self.done, math.nan)
        numbers.p_word[:, at] = p[:, 1:].diagonal().where(~self.done, math.nan)
        numbers.generated[:, at] = number
        if numbers.copied is not None:
            self.copy(u_prime, number)
        if numbers.kinds is not None:
            numbers.kinds[:, at] = action.number_type(u_prime).to(device)
        if numbers.more is not None:
            for kept, every in zip(numbers.more, action.values(u_prime), strict=True):
                kept[:, at] = every[:, 1:].double().to(device)
        if self.digits is not None:
            for row in number.nonzero()[:, 0].tolist():
                numbers.values[row, at] = numbers.written(row, at, self.digits)
        if numbers.copied is not None:
            latest = torch.cat([numbers.values[:, at, None], self.recent[:, :-1]], 1)
            self.recent = latest.where(number[:, None], self.recent)
        self.done = self.done | torch.isin(word, self.eos)
        self.start, self.end = (0 if self.cache is None else at), at + 1

    def copy(self, u_prime: Cauchy, number: Tensor) -> None:
        """Where the new token is a number (number [B]), write the earlier one that it copies, if any."""
        numbers, at = self.numbers, self.end
        found = self.action.copied(u_prime, self.recent.to(u_prime.loc.device)).to(number.device)
        assert numbers.copied is not None
        numbers.copied[:, at] = copied = number & ~found.isnan()
        numbers.values[:, at] = found.where(copied, numbers.values[:, at])
        numbers.loc[:, at] = self.model.target.forward(numbers.values[:, at]).double().where(copied, numbers.loc[:, at])


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, weights that accelerate offloads to a disk or the CPU are on the module's own device."""
    with ExitStack() as stack:
        if is_accelerate_available():  # without it nothing is offloaded
            from accelerate.utils import align_module_device

            for part in module.modules():
                stack.enter_context(align_module_device(part))
        yield
