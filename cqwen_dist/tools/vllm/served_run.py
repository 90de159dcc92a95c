"""A run in vLLM: its embedding and its heads, around the transformer that all runs of the engine share, and on whose
linear maps each token goes through the adapters of its own run:

    h = x A^T    A [K,in]: the adapters of all runs, and of all parts of a fused map, one below the other
    h = h * g    g [N,K]: 1 in the columns of the token's run, else 0
    y = y + h B  B [K,out]: alpha / r times PEFT's, transposed; 0 outside the columns of its part

Attention stays joint, as a text attends only to itself. No shape depends on which runs are in a batch, so layers are
compiled once, and a CUDA graph reads g where the last step wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.config.shape import DIGIT_COUNT
from cqwen_dist.generate.modes import ovr_logits, softmax_logits
from cqwen_dist.generate.numbers import POWERS, written_values
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.heads.numerals import ends_in_number, only
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import Shut, all_scores
from cqwen_dist.ops.ovr.scores import prob_of
from cqwen_dist.tools.vllm.request_numbers import RequestState

ADAPTERS, LORA_A, LORA_B = "run_adapters", ".lora_A.", ".lora_B."


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
        if embedding.digit_rows:  # inside a numeral only its next character may follow, behind it no digit
            behind, rows = ends_in_number(is_number, values, last), embedding.rows_on(last.device)[:DIGIT_COUNT]
            Shut(behind, rows).on(logits, -math.inf)
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


class RunAdapters(nn.Module):
    """The adapters on one linear map. Shape letters: N tokens of a step, M runs, K ranks of all adapters here."""

    gate: Tensor
    a: Tensor
    b: Tensor
    runs: Tensor  # [K], the run of each rank

    def __init__(self, linear: Any, gate: Tensor) -> None:
        """gate [most N,M]: 1 for the run of each token of a step, else 0. It is written before each step."""
        super().__init__()
        self.register_buffer("gate", gate, persistent=False)
        self.register_buffer("a", gate.new_zeros(0, linear.input_size), persistent=False)
        self.register_buffer("b", gate.new_zeros(0, linear.output_size), persistent=False)
        self.register_buffer("runs", torch.zeros(0, dtype=torch.int64, device=gate.device), persistent=False)

    def add(self, run: int, a: Tensor, b: Tensor, start: int) -> None:
        """Add one adapter: a [r,in], b [r,part] for the columns of the output from `start` on."""
        whole = self.b.new_zeros(len(b), self.b.shape[1])
        whole[:, start : start + b.shape[1]] = b
        self.a, self.b = torch.cat([self.a, a.to(self.a)]), torch.cat([self.b, whole])
        self.runs = torch.cat([self.runs, self.runs.new_full((len(a),), run)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [N,in], y [N,out] of the base -> y with adapters."""
        gate = self.gate[: x.shape[0]].index_select(1, self.runs)
        return y + ((x @ self.a.T) * gate) @ self.b


def add_adapters(
    transformer: nn.Module,
    packed: Mapping[str, Sequence[str]],
    run: int,
    scale: float,
    tensors: Mapping[str, Tensor],
    gate: Tensor,
) -> None:
    """Put a run's adapters onto vLLM's transformer, in place.

    packed: the parts of vLLM's fused maps, by name. scale: alpha / r. tensors: by PEFT's names inside of the
    transformer, A [r,in] and B [part,r]. gate: as in `RunAdapters`.
    """
    for name, a in tensors.items():
        if LORA_A not in name:
            continue
        owner, _, own = name.partition(LORA_A)[0].rpartition(".")
        fused = next((whole for whole, parts in packed.items() if own in parts), own)
        linear: Any = transformer.get_submodule(f"{owner}.{fused}")
        before = packed[fused].index(own) if fused in packed else 0
        start = sum(linear.output_sizes[:before]) if before else 0
        if not hasattr(linear, ADAPTERS):
            linear.add_module(ADAPTERS, RunAdapters(linear, gate))
            linear.register_forward_hook(lambda its, x, y: (getattr(its, ADAPTERS)(x[0], y[0]), y[1]))
        getattr(linear, ADAPTERS).add(run, a, scale * tensors[name.replace(LORA_A, LORA_B)].T, start)
