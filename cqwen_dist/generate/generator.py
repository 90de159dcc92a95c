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
from cqwen_dist.config.shape import DIGIT_COUNT
from cqwen_dist.generate.compiling import ROOM, Buffers, CompiledSteps, Ending, Kept
from cqwen_dist.generate.generation_settings import Prompt, Settings, check_prompt
from cqwen_dist.generate.modes import Laws, Options, best, find_mode
from cqwen_dist.generate.numbers import GeneratedNumbers, written_values
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.best import A_FEW, Shut, row_sizes
from cqwen_dist.ops.ovr.scores import prob_of

LATER = 1024  # tokens whose laws are recorded together, if the cache grows: no step reads them, and each has many parts
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
                ended = look(*text.recorded())
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
        self.waiting: list[tuple[Any, ...]] = []  # to be recorded, by step
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
            u_prime = self.infer(slice(self.end), self.now.mask[:, : self.end])
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
        if len(self.waiting) * len(self.now.ids) >= LATER:
            self.recorded()

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
        at, end = (self.now.at - 1, None) if self.static else (slice(self.end - 1, self.end), self.end)
        return self.infer(at, self.now.mask[:, :end])

    def infer(self, columns: slice | Tensor, mask: Tensor) -> Laws:
        """U' [B,C] at the last of these columns, which are not in the cache yet; on the device of the head."""
        now = self.now
        ids, values, positions = (each[:, columns] for each in (now.ids, now.numbers.values, now.positions))
        embeds, self.embeds = self.embeds, None
        u: Cauchy = self.model.infer(
            ids if embeds is None else None,
            values,
            mask if self.padded else None,
            position_ids=positions,
            past_key_values=now.cache,
            keep=None if ids.shape[1] == 1 else last_places(ids),
            inputs_embeds=embeds,
        )
        u = Cauchy(*(part.flatten(0, -2).to(self.action.cls_weight.device) for part in u))
        return self.mode.law(self.action, u, self.draws)

    def choose(self, u_prime: Laws) -> Tensor:
        """The next word of each row [B], on the device of the head."""
        if self.number_first and self.end == self.prompt:
            return torch.full_like(self.now.lengths, self.num_token_id, device=self.action.cls_weight.device)
        ids = self.now.ids if self.options.processors is None else self.now.ids[:, : self.end]
        seen, embedding = self.action.word_part(u_prime.words), self.model.features.embedding
        where, shut = seen.loc.device, None
        if embedding.digit_rows:  # a digit behind a number would be another number
            shut = Shut(self.now.behind.to(where), embedding.rows_on(where)[:DIGIT_COUNT])
        return self.mode.choose(self.action, seen, self.draws, self.options, ids.to(where), shut)

    def write(self, u_prime: Laws, chosen: Tensor) -> None:
        """Write the chosen word [B] or the number of each row, and advance. Laws and probabilities: `record`."""
        # Everything is computed for all rows and masked: a branch on device values would synchronise
        now, numbers, head = self.now, self.now.numbers, self.action.number_head
        at = now.at if self.static else slice(self.end, self.end + 1)
        word, new, given = chosen.to(now.ids.device), ~now.done, None
        embedding = self.model.features.embedding
        if embedding.digit_rows:
            is_number = (now.ids == self.num_token_id) & now.mask
            character = embedding.next_digits(is_number, numbers.values, now.at - 1)
            given = character >= 0
            word = character.where(given, word)
            self.put(numbers.given, given & new, at)
        decision = head.decide(u_prime.numbers, now.memory, numbers.intervals.bar)
        y, which, number = decision.y, decision.written, (word == self.num_token_id) & new
        if given is not None:
            now.behind.copy_(given | number)
        value = written_values(decision, self.target, numbers.intervals, self.digits, now.powers)
        self.put(now.ids, word.masked_fill(now.done, self.pad_token_id), at)
        self.put(numbers.values, value.masked_fill_(~number, 0.0), at)
        head.remember(now.memory, word, value, number)
        for end in self.ends:
            now.done.logical_or_(word == end)
        if self.most_doubt:
            doubtful = self.doubtful(u_prime, chosen, y, which, number) & new
            doubtful = doubtful if given is None else doubtful & ~given
            self.put(numbers.abstained, doubtful, at)
            now.done.logical_or_(doubtful)
        step = *u_prime.words, *u_prime.numbers, chosen, *y, which, number, new, given
        if self.static:
            self.record(at, step)
        else:
            self.waiting.append(step)
        if self.static or embedding.digit_rows:  # else only the host needs it
            now.at.add_(1)

    def record(self, at: slice | Tensor, step: Sequence[Any]) -> None:
        """Write the laws and probabilities of n steps, [n*B,...] each, into their columns `at`."""
        *u_prime, chosen, loc, scale, which, number, new, given = step
        action, numbers, device, head = self.action, self.now.numbers, self.now.ids.device, self.action.word_head()
        words, of_numbers = Cauchy(*u_prime[:2]), self.mode.numbers or self.mode
        seen, y_noise = action.word_part(words).to(action.cls_weight.dtype), scale
        own = head.take(chosen.to(seen.loc.device))
        law, gap = own.of_own(seen)
        p = prob_of(seen, head, torch.full_like(chosen, self.num_token_id)), prob_above(law.scale, gap)
        p_num, p_word = (numbers.intervals.words.shown(each.double()).to(device) for each in p)
        if not self.model.config.learns_words:  # nothing but a number can follow
            p_num, p_word = torch.ones_like(p_num), torch.ones_like(p_word)
        if given is not None:
            p_word, p_num = p_word.masked_fill(given, 1.0), p_num.masked_fill(given, 0.0)
        noise = own.of_own(action.word_part(self.mode.noise_of(action, words)).to(seen.loc.dtype))[0].scale
        if of_numbers.drawn != "individual":  # which leaves only noise: all of Y's scale, to the bit
            y_noise = action.number_head.value(of_numbers.noise_of(action, Cauchy(*u_prime[2:]))).scale
        loc, *scales = (each.double().to(device) for each in (loc, law.scale, noise, scale, y_noise))
        parts = torch.stack([scales[0] - scales[1], scales[1], scales[2] - scales[3], scales[3]], 1)
        if numbers.which is not None and which is not None:
            self.put(numbers.which, which.to(device).where(number, -1), at)
        self.put(numbers.loc, loc.where(number, 0.0), at)
        self.put(numbers.scale, scales[2].where(number, 0.0), at)
        self.put(numbers.p_num, p_num.where(new, math.nan), at)
        self.put(numbers.p_word, p_word.where(new, math.nan), at)
        self.put(numbers.generated, number, at)
        self.put(numbers.parts, parts.where(new[:, None], math.nan), at)
        self.now.lengths.add_(new.unflatten(0, (-1, len(self.now.done))).sum(0))

    def doubtful(self, u_prime: Laws, chosen: Tensor, y: Cauchy, which: Tensor | None, number: Tensor) -> Tensor:
        """Whose word or number [B] is too doubtful. Arguments as in `record`."""
        device, head = number.device, self.action.word_head()
        seen = self.action.word_part(u_prime.words).to(self.action.cls_weight.dtype)
        loc = head.take(chosen.to(seen.loc.device)).of_own(seen)[0].loc.float()
        found = (head.loc(seen).float().logsumexp(1) - loc > self.most_doubt["words"]).to(device)
        if self.number_first and self.end == self.prompt:  # nobody asked whether it comes
            found = torch.zeros_like(number)
        wide = (y.scale > self.most_doubt["numbers"]).to(device)
        if which is not None:  # an exact value has its own bar
            wide = wide & (which < 0).to(device)
        return found | (number & wide)

    def put(self, buffer: Tensor, found: Tensor, at: slice | Tensor) -> None:
        """Write found [n*B,...], of n steps, into the columns `at` of a buffer [B,T',...]."""
        buffer[:, at] = found.unflatten(0, (-1, len(buffer))).transpose(0, 1)

    def recorded(self) -> tuple[Tensor, GeneratedNumbers]:
        """Prompt and continuation so far, as views."""
        if self.waiting:
            steps = [each[0] if each[0] is None else torch.cat(each) for each in zip(*self.waiting, strict=True)]
            self.record(slice(self.end - len(self.waiting), self.end), steps)
            self.waiting.clear()
        return self.now.ids[:, : self.end], self.now.numbers.until(self.end)

    def result(self) -> tuple[Tensor, GeneratedNumbers]:
        """Prompt and continuation, cut to the longest row."""
        ids, numbers = self.recorded()
        end = self.prompt + int(self.now.lengths.max())
        ids, numbers = ids[:, :end], numbers.until(end)
        if self.kept is None:
            return ids, numbers
        found = ids.clone(), numbers.clone()
        self.model.kept_decoding = self.kept  # the next generation reuses this memory
        return found


def whole_step(text: _Continuation) -> None:
    """A step after the first: reads only the last column."""
    u_prime = text.infer_next()
    text.write(u_prime, text.choose(u_prime))
