"""The autoregressive loop (seed S3 figure 4.2): words and numbers, one position at a time, for a left-padded batch.

A generated number is fed back as (<NUM>, its written value), a word as (word, 0), so ids and values stay aligned.
Shape letters: B rows, T prompt positions, T' positions at the end, C causal dimensions, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cqwen_dist.batch import last_places
from cqwen_dist.generate.compiling import ROOM, Buffers, CompiledSteps, Ending, Kept
from cqwen_dist.generate.generation_settings import Prompt, Settings, check_prompt
from cqwen_dist.generate.modes import Laws, Options, best, find_mode
from cqwen_dist.generate.numbers import GeneratedNumbers, written_values
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.best import A_FEW, row_sizes
from cqwen_dist.ops.ovr.scores import prob_of

# Called after each step with the ids [B,t] and their numbers. Returns the rows to end [B] bool, or None.
Watch = Callable[[Tensor, GeneratedNumbers], Tensor | None]


def generate(
    model: Any,
    input_ids: Tensor,
    numeric_values: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    watch: Sequence[Watch] = (),
    **settings: Any,
) -> tuple[Tensor, GeneratedNumbers]:
    """Continue prompts.

    model: a `CausalQwenModel`.
    input_ids [B,T] int64; numeric_values [B,T], raw unit, 0 at text (default: all text); attention_mask [B,T], 0 at
        padding and at tokens that are left out; a row ends with a token, so padding is on the left.
    inputs_embeds [B,T,H]: read instead of the prompt's ids, which then only give earlier numbers to copy.
    watch: called after each step with everything written so far; may end rows.
    settings: fields of `generate.generation_settings.Settings`, such as mode, max_new_tokens, temperature, seed.

    Returns prompt + continuation [B,T'] int64 and their `GeneratedNumbers`. Raises `UserError` for invalid settings, an
    empty prompt, a prompt longer than the context, ids outside the vocabulary, values that are not finite, and padding
    on the right; ValueError if this process has only a part of the head.
    """
    chosen = Settings(**settings)
    if not model.config.learns_words:  # a model of numbers only answers with one
        chosen = replace(chosen, number_first=True, max_new_tokens=min(1, chosen.max_new_tokens))
    check_prompt(model, input_ids, numeric_values, attention_mask)
    # Inference-mode tensors cannot be modified later, and the static cache outlives this call
    with torch.inference_mode(False), torch.no_grad(), at_hand(model.action):
        text = _Continuation(model, chosen, Prompt(input_ids, numeric_values, attention_mask, inputs_embeds))
        now, over = text.now, Ending(text.now.done, at_once=bool(watch))
        while text.end < text.total and not over():
            text.step()
            for look in watch:
                ended = look(now.ids[:, : text.end], now.numbers.until(text.end))
                if ended is not None:
                    now.done.logical_or_(ended.to(now.done.device))
        return text.result()


class _Continuation:
    """The state of one generation. A step reads and writes the buffers in `now`."""

    def __init__(self, model: Any, settings: Settings, given: Prompt) -> None:
        config, base, prompt = model.config, model.config.base_config, given.ids.shape[1]
        self.model, self.action, self.target = model, model.action, model.target
        self.num_token_id, self.pad_token_id = int(config.num_token_id), settings.padding(config)
        self.ends, self.digits, self.number_first = settings.ends(config), settings.digits, settings.number_first
        self.prompt = self.end = prompt
        self.total = min(prompt + settings.max_new_tokens, max(prompt, base.max_position_embeddings))
        # Without padding no mask is passed on: transformers would read a mask on the host in each step
        self.padded = given.mask is not None and not bool(given.mask.all())
        self.embeds = given.embeds  # until they are in the cache
        # LongRoPE turns all positions otherwise in texts longer than its first context: then all words are read again
        rope = getattr(base, "rope_parameters", None) or {}
        first = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else self.total
        self.turn = first + 1 if prompt <= first < self.total - 1 and given.embeds is None else None
        self.static = settings.static and self.turn is None and not config.depths  # hooks do not compile
        self.use_cache = settings.use_cache or given.embeds is not None
        room = -(-self.total // ROOM) * ROOM if self.static else self.total
        self.now = Buffers.of(model, given.ids, given.values, given.mask, room, self.pad_token_id)
        self.kept = Kept.of(model) if self.static else None
        if self.kept is not None:
            types = getattr(base, "layer_types", None) or ["attention"] * base.num_hidden_layers
            self.now = self.kept.take(self.now, types, self.dtype)
        elif self.use_cache:
            self.now = replace(self.now, cache=DynamicCache(config=base))
        self.mode = find_mode(settings.mode)
        self.options = self.options_of(settings)
        self.most_doubt = settings.most_doubt(self.now.numbers.intervals)
        self.draws = settings.draws(given.ids.device, self.now.numbers.intervals)
        self.steps = None
        if self.kept is not None:
            self.steps = CompiledSteps.of(self.kept, settings, self.padded, model, given.ids.device)

    def options_of(self, settings: Settings) -> Options:
        """The options of the mode's `choose`."""
        config, mode, weight = self.model.config, self.mode, self.action.cls_weight
        rank_by = settings.decode_rule or mode.rank_by
        # Row norms and the bf16 copy read all of W_cls, which only pays off over two or more steps
        several = mode.choose is best and rank_by == "ovr" and self.total > self.prompt + 1
        fixed = self.static or weight.is_cuda
        return Options(
            used_rows=int(config.used_rows) if settings.used_rows is None else settings.used_rows,
            rank_by=rank_by,
            do_sample=bool(mode.draws if settings.do_sample is None else settings.do_sample),
            processors=settings.logits_processor,
            added_from=config.added_from,
            sizes=row_sizes(weight) if several and not fixed and len(self.now.ids) <= A_FEW else None,
            near=self.near() if several and fixed else None,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the backbone, read from its token table, since w_num stays fp32."""
        return self.model.features.embedding.token_embedding.weight.dtype

    def near(self) -> Tensor | None:
        """W_cls in bf16 for a shortlist. None if W_cls is not fp32, if the backbone is fp32 (the user wants full
        precision), or if all scales are 0, as infinite z have no order."""
        weight = self.action.cls_weight
        if weight.dtype != torch.float32 or self.dtype.itemsize != 2:
            return None
        if self.mode.drawn == "individual" and not (
            self.mode.noise and bool(self.action.b_noise[: weight.shape[1]].any())
        ):
            return None
        return weight.bfloat16() if self.kept is None else self.kept.copied(weight)

    def step(self) -> None:
        """Choose and write the next token of each row; a row that has ended gets padding."""
        if self.end == self.turn and self.use_cache:
            self.now = replace(self.now, cache=DynamicCache(config=self.model.config.base_config))
        # The first step reads the prompt, in a shape of its length
        if self.end in (self.prompt, self.turn) or not self.use_cache:
            u_prime = self.infer(torch.arange(self.end, device=self.now.at.device), self.now.mask[:, : self.end])
            self.write(u_prime, self.choose(u_prime))
        else:
            if self.kept is not None:
                self.draw_ahead(self.kept)
            torch.compiler.cudagraph_mark_step_begin()  # the CUDA graph may overwrite the outputs of the last step
            if self.steps is None:
                whole_step(self)
            elif self.options.processors is None:
                self.steps(whole_step, self)
            else:  # processors run uncompiled between two compiled halves: they see ids of growing length
                u_prime = self.steps(_Continuation.infer_next, self)
                self.steps(_Continuation.write, self, u_prime, self.choose(u_prime))
        self.end += 1

    def draw_ahead(self, kept: Kept) -> None:
        """Draw the random numbers of a step before it: a compiled step cannot draw from a generator."""
        for mode, draws in ((self.mode.numbers, self.draws.apart), (self.mode, self.draws)):
            found = None if mode is None else mode.random(self.action, self.options)
            if found is not None and draws is not None:
                law, width = found
                key = width, mode is self.mode
                draws.draw_ahead(kept.random(len(self.now.ids), key, self.action.cls_weight.device), law)

    def infer_next(self) -> Laws:
        """`infer` for the last column, using the cache. With a static cache the mask covers all columns: unwritten
        columns stay True, and the causal mask hides them."""
        return self.infer(self.now.at - 1, self.now.mask if self.static else self.now.mask[:, : self.end])

    def infer(self, columns: Tensor, mask: Tensor) -> Laws:
        """U' [B,C] at the last of these columns [w], which are not in the cache yet; on the device of the head."""
        now = self.now
        ids, values, positions = (
            each.index_select(1, columns) for each in (now.ids, now.numbers.values, now.positions)
        )
        embeds, self.embeds = self.embeds, None
        u: Cauchy = self.model.infer(
            ids if embeds is None else None,
            values,
            mask if self.padded else None,
            position_ids=positions,
            past_key_values=now.cache,
            keep=last_places(ids),
            inputs_embeds=embeds,
        )
        return self.mode.law(self.action, u.to(self.action.cls_weight.device), self.draws)

    def choose(self, u_prime: Laws) -> Tensor:
        """The next word of each row [B], on the device of the head."""
        if self.number_first and self.end == self.prompt:
            return torch.full_like(self.now.lengths, self.num_token_id, device=self.action.cls_weight.device)
        ids = self.now.ids if self.options.processors is None else self.now.ids[:, : self.end]
        seen = self.action.word_part(u_prime.words)
        return self.mode.choose(self.action, seen, self.draws, self.options, ids.to(seen.loc.device))

    def write(self, u_prime: Laws, word: Tensor) -> None:
        """Write the word [B] or number of each row with its probabilities and laws, and advance `at`."""
        # Everything is computed for all rows and masked: a branch on device values would synchronise
        action, now, numbers, device = self.action, self.now, self.now.numbers, self.now.ids.device
        seen, head = action.word_part(u_prime.words).to(action.cls_weight.dtype), action.word_head()
        shown = numbers.intervals.words.shown
        p_num = shown(prob_of(seen, head, torch.full_like(word, self.num_token_id)).double()).to(device)
        own, of_numbers = head.take(word.to(seen.loc.device)), self.mode.numbers or self.mode
        noise = Laws(*(mode.noise_of(action, u) for mode, u in zip((self.mode, of_numbers), u_prime, strict=True)))
        law, gap = own.of_own(seen)
        p_word = shown(prob_above(law.scale, gap).double()).to(device)
        if not self.model.config.learns_words:  # nothing but a number can follow
            p_num, p_word = torch.ones_like(p_num), torch.ones_like(p_word)
        embedding = self.model.features.embedding
        if embedding.digit_rows:
            is_number = (now.ids == self.num_token_id) & now.mask
            given = embedding.next_digits(is_number, numbers.values, now.at - 1)
            word = given.where(given >= 0, word.to(device))
            p_word, p_num = p_word.masked_fill(given >= 0, 1.0), p_num.masked_fill(given >= 0, 0.0)
            self.put(numbers.given, (given >= 0) & ~now.done)
        decision = action.number_head.decide(u_prime.numbers, now.memory, numbers.intervals.bar)
        word, y = word.to(device), decision.y.to(torch.float64).to(device)
        new = ~now.done
        number = (word == self.num_token_id) & new
        word_noise = own.of_own(action.word_part(noise.words).to(seen.loc.dtype))[0].scale.double().to(device)
        number_noise, word_scale = (
            each.scale.double().to(device) for each in (action.number_head.value(noise.numbers), law)
        )
        parts = torch.stack([word_scale - word_noise, word_noise, y.scale - number_noise, number_noise], 1)
        doubtful = torch.zeros_like(new)
        if self.most_doubt:
            chosen = ~numbers.given.index_select(1, now.at)[:, 0]
            doubtful = new & chosen & self.doubtful(seen, law, decision, number)
            self.put(numbers.abstained, doubtful)
        value = written_values(decision, self.target, numbers.intervals, self.digits, now.powers).where(number, 0.0)
        if numbers.which is not None and decision.written is not None:
            self.put(numbers.which, decision.written.to(device).where(number, -1))
        self.put(now.ids, torch.where(new, word, self.pad_token_id))
        self.put(numbers.values, value)
        self.put(numbers.loc, y.loc.where(number, 0.0))
        self.put(numbers.scale, y.scale.where(number, 0.0))
        self.put(numbers.p_num, p_num.where(new, math.nan))
        self.put(numbers.p_word, p_word.where(new, math.nan))
        self.put(numbers.generated, number)
        self.put(numbers.parts, parts.where(new[:, None], math.nan))
        action.number_head.remember(now.memory, word, value, number)
        now.lengths.add_(new)
        for end in self.ends:
            now.done.logical_or_(word == end)
        now.done.logical_or_(doubtful)
        now.at.add_(1)

    def doubtful(self, seen: Cauchy, law: Cauchy, decision: Decision, number: Tensor) -> Tensor:
        """Which rows [B] bool are to abstain. law: S of their words; number [B] bool: where these are <NUM>."""
        device = number.device
        doubt = self.action.word_head().loc(seen).float().logsumexp(1) - law.loc.float()
        found = (doubt > self.most_doubt["words"]).to(device)
        if self.number_first and self.end == self.prompt:  # nobody asked whether it comes
            found = torch.zeros_like(number)
        wide = (decision.y.scale > self.most_doubt["numbers"]).to(device)
        if decision.written is not None:  # an exact value has its own bar
            wide = wide & (decision.written < 0).to(device)
        return found | (number & wide)

    def put(self, buffer: Tensor, found: Tensor) -> None:
        """Write found [B,...] into the current column of a buffer [B,T',...]."""
        buffer.index_copy_(1, self.now.at, found.unsqueeze(1))

    def result(self) -> tuple[Tensor, GeneratedNumbers]:
        """Prompt and continuation, cut to the longest row."""
        end = self.prompt + int(self.now.lengths.max())
        ids, numbers = self.now.ids[:, :end], self.now.numbers.until(end)
        if self.kept is None:
            return ids, numbers
        found = ids.clone(), numbers.clone()
        self.model.kept_decoding = self.kept  # the next generation reuses this memory
        return found


def whole_step(text: _Continuation) -> None:
    """A step after the first: reads only the last column."""
    u_prime = text.infer_next()
    text.write(u_prime, text.choose(u_prime))
