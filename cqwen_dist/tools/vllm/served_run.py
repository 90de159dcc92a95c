"""A run in vLLM: its embedding and its heads, around the transformer that all runs of the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.generate.modes import ovr_logits, softmax_logits
from cqwen_dist.generate.numbers import POWERS, written_values
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.heads.numerals import only
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import all_scores
from cqwen_dist.ops.ovr.scores import prob_of
from cqwen_dist.tools.vllm.request_numbers import RequestState


class ServedRun(nn.Module):
    """Shape letters: R requests of this run in a step, V vocabulary."""

    def __init__(self, config: Any, base: Any) -> None:
        """base: vLLM's causal model, with the table of tokens."""
        super().__init__()
        self.config = config
        self.model = CausalQwenModel(config, base=base)
        self.intervals = Intervals.from_dict(config.calibration)
        self.powers = POWERS.to(self.model.action.cls_weight.device)

    def forward(
        self, z: Tensor, states: Sequence[RequestState] = (), before: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """z [R,H] -> (logits [R,V], facts [R,F] of the number that could come next, as `RequestNumbers.write`).

        Logits are log P of each word, or loc_S in mode compatible: the largest is the word of `generate` in modes
        standard and compatible. before: as `RequestNumbers.before`. Without states no number is decided.
        """
        action = self.model.action
        u = self.model.abduction(z)
        u_prime = Cauchy(*action.add_noise(Cauchy(u.loc.float(), u.scale.float())))
        seen = action.word_part(u_prime).to(action.cls_weight.dtype)
        head = action.word_head(int(self.config.used_rows))
        logits = ovr_logits(*all_scores(seen, head.take(slice(0, head.rows))), action.rows)
        softmax = [row for row, state in enumerate(states) if state.mode == "compatible"]
        if softmax:
            loc = action.word_head().loc(Cauchy(seen.loc[softmax], seen.scale[softmax]))
            logits[softmax] = softmax_logits(loc, self.config.added_from)
        num_ids = torch.full((len(logits),), int(self.config.num_token_id), device=logits.device)
        words = self.config.learns_words  # else nothing but a number can follow
        facts = logits.new_zeros(0)
        if states:
            p_num = prob_of(seen, action.word_head(), num_ids) if words else torch.ones_like(u_prime.loc[:, 0])
            facts = self._decide(logits, u_prime, p_num, states, *before)
        return logits if words else only(logits, num_ids), facts

    def _decide(
        self,
        logits: Tensor,
        u_prime: Cauchy,
        p_num: Tensor,
        states: Sequence[RequestState],
        ids: Tensor,
        values: Tensor,
        is_number: Tensor,
        last: Tensor,
    ) -> Tensor:
        """Decide the number of each request, if one comes next -> its facts [R,F]; force the characters of numerals in
        logits [R,V]."""
        head, target, embedding = self.model.action.number_head, self.model.target, self.model.features.embedding
        if embedding.digit_rows:  # inside a numeral only its next character may follow
            logits.copy_(only(logits, embedding.next_digits(is_number, values, last)))
        positions = torch.arange(values.shape[1], device=last.device).expand_as(values)
        at = torch.arange(len(last), device=last.device) * values.shape[1] + last
        decision = head.decide(u_prime, head.memory(ids, is_number, values, positions, at), self.intervals.bar)
        value = torch.zeros_like(values[:, 0])
        for digits in {state.digits for state in states}:
            own = torch.tensor([row for row, state in enumerate(states) if state.digits == digits], device=last.device)
            exact = None if decision.exact is None else decision.exact[own]
            some = Decision(decision.y._replace(loc=decision.y.loc[own], scale=decision.y.scale[own]), exact)
            value[own] = written_values(some, target, self.intervals, digits, self.powers)
        facts = [value, *decision.y, self.intervals.words.shown(p_num.double()), decision.written]
        return torch.stack([torch.zeros_like(value) if each is None else each.double() for each in facts], 1)
