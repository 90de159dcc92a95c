"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number goes back in as (<NUM>, its value as written), a word as (word, 0), so ids and values stay aligned.
Letters: B rows, T prompt positions, T' positions at the end, C causal dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cqwen_dist.generate.buffers import ROOM, Buffers, Kept
from cqwen_dist.generate.compiling import CompiledSteps, Ending
from cqwen_dist.generate.generation_settings import Settings, check_prompt
from cqwen_dist.generate.modes import Draws, Options, best, find_mode
from cqwen_dist.generate.numbers import GeneratedNumbers, number_interval, rounded
from cqwen_dist.generate.offloaded import at_hand
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import A_FEW, row_sizes
from cqwen_dist.ops.ovr.scores import prob_of

# Called after every step with the ids [B,t] and their numbers; returns the rows that end here [B] bool, or None.
Watch = Callable[[Tensor, GeneratedNumbers], Tensor | None]


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
    # what torch.inference_mode makes can be written in it alone, and a static cache's memory stays
    with torch.inference_mode(False), torch.no_grad(), at_hand(model.action):
        text = _Continuation(model, chosen, input_ids, numeric_values, attention_mask)
        now, over = text.now, Ending(text.now.done, at_once=bool(watch))
        while text.end < text.total and not over():
            text.step()
            for look in watch:
                ended = look(now.ids[:, : text.end], now.numbers.until(text.end))
                if ended is not None:
                    now.done.logical_or_(ended.to(now.done.device))
        return text.result()


class _Continuation:
    """Prompts and continuations, and how the mode chooses. A step reads and writes `now`."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        input_ids: Tensor,
        numeric_values: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        config, base, prompt = model.config, model.config.base_config, input_ids.shape[1]
        self.model, self.action, self.target = model, model.action, model.target
        self.num_token_id, self.pad_token_id = int(config.num_token_id), settings.padding(base)
        self.ends, self.digits, self.number_first = settings.ends(base), settings.digits, settings.number_first
        self.prompt = self.end = prompt
        self.total = min(prompt + settings.max_new_tokens, max(prompt, base.max_position_embeddings))
        # where no row is padded, transformers needs no mask and does not look, which the host would wait for
        self.padded = attention_mask is not None and not bool(attention_mask.all())
        self.static, self.use_cache = settings.static, settings.use_cache
        room = -(-self.total // ROOM) * ROOM if self.static else self.total
        self.now = Buffers.of(model, input_ids, numeric_values, attention_mask, room, self.pad_token_id)
        self.kept = Kept.of(model) if self.static else None
        if self.kept is not None:
            self.now = self.kept.take(self.now, base.num_hidden_layers, self.dtype)
        elif self.use_cache:
            self.now = replace(self.now, cache=DynamicCache(config=base))
        self.mode = find_mode(settings.mode)
        self.options = self.options_of(settings)
        temperature = 1.0 if settings.temperature is None else settings.temperature
        self.draws = Draws(settings.generator_on(input_ids.device), temperature, settings.eps_truncation)
        self.steps = None
        if self.kept is not None:
            self.steps = CompiledSteps.of(self.kept, settings, self.padded, model, input_ids.device)

    def options_of(self, settings: Settings) -> Options:
        """How the mode chooses a word."""
        config, mode, weight = self.model.config, self.mode, self.action.cls_weight
        rank_by = settings.decode_rule or mode.rank_by
        # what is made once for all steps pays off where there are several
        several = mode.choose is best and rank_by == "ovr" and self.total > self.prompt + 1
        fixed = self.static or weight.is_cuda
        return Options(
            used_rows=int(config.used_rows) if settings.used_rows is None else settings.used_rows,
            rank_by=rank_by,
            do_sample=settings.do_sample,
            processors=settings.logits_processor,
            added_from=int(config.used_rows) if config.added_rows else None,
            sizes=row_sizes(weight) if several and not fixed and len(self.now.ids) <= A_FEW else None,
            near=self.near() if several and fixed else None,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's: that of its token table, as w_num beside it stays fp32."""
        found: torch.dtype = self.model.features.embedding.token_embedding.weight.dtype
        return found

    def near(self) -> Tensor | None:
        """W_cls in bf16 for a shortlist; None where it would save nothing, where the model is in fp32 throughout, and
        where every scale is 0."""
        weight = self.action.cls_weight
        if weight.dtype != torch.float32 or self.dtype.itemsize != 2:
            return None
        if self.mode.drawn == "individual" and not (
            self.mode.noise and bool(self.action.b_noise[: weight.shape[1]].any())
        ):
            return None
        return weight.bfloat16() if self.kept is None else self.kept.copied(weight)

    def step(self) -> None:
        """Choose the next token of every row and write it; a row that has ended gets padding."""
        if self.end == self.prompt or not self.use_cache:  # everything is read
            u_prime = self.infer(torch.arange(self.end, device=self.now.at.device), self.now.mask[:, : self.end])
            self.write(u_prime, self.choose(u_prime))
        else:
            if self.kept is not None:
                self.draw_ahead(self.kept)
            torch.compiler.cudagraph_mark_step_begin()  # what the last step returned is not needed any more
            if self.steps is None:
                whole_step(self)
            elif self.options.processors is None:
                self.steps(whole_step, self)
            else:  # processors are Hugging Face's own or the user's: they see ids of a length that grows
                u_prime = self.steps(first_half, self)
                self.steps(second_half, self, u_prime, self.choose(u_prime))
        self.end += 1

    def draw_ahead(self, kept: Kept) -> None:
        """Draw what the next step needs: a compiled step cannot draw from a generator."""
        found = self.mode.random(self.action, self.options)
        if found is not None:
            law, width = found
            self.draws.draw_ahead(kept.random(len(self.now.ids), width, self.action.cls_weight.device), law)

    def infer_next(self) -> Cauchy:
        """`infer` of the last column alone, by the cache. Columns of the mask that are not written yet are True, as the
        last of them must be, which says that this column is none of padding; causality hides them."""
        return self.infer(self.now.at - 1, self.now.mask if self.static else self.now.mask[:, : self.end])

    def infer(self, columns: Tensor, mask: Tensor) -> Cauchy:
        """U' [B,C] at the last of these columns [w], which are new to the cache; on the head's device."""
        now = self.now
        ids, values, positions = (
            each.index_select(1, columns) for each in (now.ids, now.numbers.values, now.positions)
        )
        u: Cauchy = self.model.infer(
            ids,
            values,
            mask if self.padded else None,
            position_ids=positions,
            past_key_values=now.cache,
            keep=torch.arange(1, len(ids) + 1, device=ids.device) * ids.shape[1] - 1,
        )
        return self.mode.law(self.action, u.to(self.action.cls_weight.device), self.draws)

    def choose(self, u_prime: Cauchy) -> Tensor:
        """A word for every row [B], on the head's device."""
        if self.number_first and self.end == self.prompt:
            return torch.full_like(self.now.lengths, self.num_token_id, device=u_prime.loc.device)
        ids = self.now.ids if self.options.processors is None else self.now.ids[:, : self.end]
        seen = self.action.word_part(u_prime)
        return self.mode.choose(self.action, seen, self.draws, self.options, ids.to(seen.loc.device))

    def write(self, u_prime: Cauchy, word: Tensor) -> None:
        """Write each row's word [B], or its number, with what is known of it; move on."""
        action, now, numbers, device = self.action, self.now, self.now.numbers, self.now.ids.device
        seen, head = action.word_part(u_prime).to(action.cls_weight.dtype), action.word_head()
        p_num = prob_of(seen, head, torch.full_like(word, self.num_token_id)).double().to(device)
        p_word = prob_of(seen, head, word).double().to(device)
        decision = action.number_head.decide(u_prime, now.memory)
        word, y = word.to(device), decision.y.to(torch.float64).to(device)
        new = ~now.done
        number = (word == self.num_token_id) & new
        value = self.target.inverse(y.loc)
        if self.digits is not None:
            value = self.shown(value, y)
        if numbers.copied is not None:
            exact = decision.exact.to(device)
            copied = number & ~exact.isnan()
            value = exact.where(copied, value)
            self.put(numbers.copied, copied)
        value = value.where(number, 0.0)
        self.put(now.ids, torch.where(new, word, self.pad_token_id))
        self.put(numbers.values, value)
        self.put(numbers.loc, y.loc.where(number, 0.0))
        self.put(numbers.scale, y.scale.where(number, 0.0))
        self.put(numbers.p_num, p_num.where(new, math.nan))
        self.put(numbers.p_word, p_word.where(new, math.nan))
        self.put(numbers.generated, number)
        if numbers.kinds is not None:
            self.put(numbers.kinds, decision.kind.to(device))
        if numbers.more is not None:
            for kept, law in zip(numbers.more, decision.more, strict=True):
                self.put(kept, law.double().to(device))
        action.number_head.remember(now.memory, value, number)
        now.lengths.add_(new)
        for end in self.ends:
            now.done.logical_or_(word == end)
        now.at.add_(1)

    def put(self, buffer: Tensor, found: Tensor) -> None:
        """Write found [B,...] into the new column of a buffer [B,T',...]."""
        buffer.index_copy_(1, self.now.at, found.unsqueeze(1))

    def shown(self, value: Tensor, y: Cauchy) -> Tensor:
        """The values [B] with the digits that are written (`GeneratedNumbers.written`)."""
        spread = torch.zeros_like(value)
        if self.digits == "auto":
            low, high = number_interval(y, self.target, self.now.numbers.intervals, 0.5)
            spread = (high - low) / 2
        assert self.digits is not None
        return rounded(value, spread, self.digits, self.now.powers)

    def result(self) -> tuple[Tensor, GeneratedNumbers]:
        """Prompt and continuation, up to the end of the longest row."""
        end = self.prompt + int(self.now.lengths.max())
        ids, numbers = self.now.ids[:, :end], self.now.numbers.until(end)
        if self.kept is None:
            return ids, numbers
        return ids.clone(), numbers.clone()  # the next generation writes into the same memory


def whole_step(text: _Continuation) -> None:
    """A step that reads the last column alone."""
    u_prime = text.infer_next()
    text.write(u_prime, text.choose(u_prime))


def first_half(text: _Continuation) -> Cauchy:
    """A step up to the choice of the word."""
    return text.infer_next()


def second_half(text: _Continuation, u_prime: Cauchy, word: Tensor) -> None:
    """The rest of that step."""
    text.write(u_prime, word)
