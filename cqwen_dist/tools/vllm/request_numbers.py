"""Numbers of vLLM requests by request and position, in the process that runs the model.

vLLM passes ids from step to step, and a model sees only the flattened tokens of all requests. A logits processor is the
only part that learns which request is in which batch row, with its `extra_args`. So this one changes no logit: it keeps
a table of values [requests, positions]. The model reads its tokens' values from the table and writes the number that
would come next, which is the value in the next step if <NUM> is chosen.

A request's extra_args: numbers, the values of its prompt's <NUM>, in order; digits and mode as in `generate`; run,
0 for the first that is served; key, under which `NumbersWorker.numbers_of` gives its numbers out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.numbers import Digits

HERE: WeakValueDictionary[str, RequestNumbers] = WeakValueDictionary()  # by vLLM's instance id: one for each engine


@dataclass
class RequestState:
    """A request, also while it is preempted."""

    digits: Digits | None
    mode: str
    run: int = 0
    slot: int = -1  # its row of the table
    steps: list[tuple[Tensor, int]] = field(default_factory=list)  # (facts [R,F] of a step, its row)
    sent: int = 0  # steps already returned

    def facts(self, start: int = 0) -> list[list[float]]:
        """Facts [F] of the positions that were decided in the steps from `start` on; the first is the position."""
        rows = [facts[row] for facts, row in self.steps[start:]]
        return [fact for fact in torch.stack(rows).tolist() if fact[0] >= 0] if rows else []


class RequestNumbers(LogitsProcessor):
    """The table. Its last row belongs to padding."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises `ValueError`, which vLLM answers with status 400. Without numbers, a text that vLLM's own server has
        read would have 0 in their place."""
        numbers = (sampling_params.extra_args or {}).get("numbers")
        if not isinstance(numbers, list) or not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            allowed = "vllm_xargs with numbers, a list with a value for each <NUM> of the ids; texts: cqwen serve"
            raise ValueError(str(UserError("numbers", numbers, allowed)))
        if sampling_params.prompt_logprobs is not None:
            raise ValueError(str(UserError("prompt_logprobs", sampling_params.prompt_logprobs, "none")))

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        rows, width = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self.num_token_id = int(vllm_config.model_config.hf_config.num_token_id)
        self.values = torch.full((rows + 1, width + 1), math.nan, dtype=torch.float64, device=device)  # nan: a word
        self.ids = torch.zeros((rows + 1, width + 1), dtype=torch.int64, device=device)
        self.first = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # the first position not decided yet
        self.free = list(range(rows))
        self.rows: dict[int, RequestState] = {}  # by row of the batch
        self.kept: dict[str, RequestState] = {}  # by key
        self.slots = torch.full((1,), rows, device=device)
        self.runs = torch.zeros(1, dtype=torch.int64, device=device)  # of each row; the last one is padding's
        self.last: tuple[Tensor, Tensor] | None = None  # slot and position of each request's last token in this step
        HERE[vllm_config.instance_id] = self

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests through the rows of the batch, in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._leave(row)
        for row, params, prompt, written in batch_update.added:
            self._leave(row)
            self.rows[row] = self._enter(params, prompt or [], written)
        for one, other, way in batch_update.moved:
            if way != MoveDirectionality.SWAP:
                self._leave(other)  # it has ended: vLLM lists a row either as removed or as the target of a move
            moved, met = self.rows.pop(one, None), self.rows.pop(other, None)
            self.rows |= {row: state for row, state in ((other, moved), (one, met)) if state is not None}
        slots = [self.rows[row].slot for row in range(len(self.rows))]
        self.slots = torch.tensor([*slots, len(self.values) - 1], device=self.values.device)
        self.runs = torch.tensor([*(self.rows[row].run for row in range(len(slots))), 0], device=self.values.device)

    def _leave(self, row: int) -> None:
        state = self.rows.pop(row, None)
        if state is not None:
            self.free.append(state.slot)

    def _enter(self, params: Any, prompt: list[int], written: list[int]) -> RequestState:
        """Assign a table row to a request and fill in the known values, at first those of the prompt."""
        extra = params.extra_args or {}
        state = extra.get("state")
        if state is None:
            state = RequestState(extra.get("digits", "auto"), extra.get("mode", "ovr"), extra.get("run", 0))
            params.extra_args = {**extra, "state": state}  # vLLM keeps its copy of params for when the request returns
            if "key" in extra:
                self.kept[extra["key"]] = state
        state.slot = self.free.pop()
        known = torch.full((self.values.shape[1],), math.nan, dtype=torch.float64)
        places = (place for place, token in enumerate(prompt) if token == self.num_token_id)
        for place, value in zip(places, extra.get("numbers", ()), strict=False):
            known[place] = value
        for at, value, *_ in state.facts():
            known[int(at)] = value
        self.values[state.slot] = known.to(self.values.device)
        self.ids[state.slot, : len(prompt) + len(written)] = torch.tensor([*prompt, *written], device=self.ids.device)
        self.first[state.slot] = len(prompt) + len(written)
        return state

    def read(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens of a step [N]: values float64, 0 at words, and runs int64. Called once a step, before the
        layers."""
        metadata = get_forward_context().attn_metadata
        if not self.rows or not metadata:  # vLLM measures memory
            self.last = None
            return torch.zeros(ids.shape, dtype=torch.float64, device=ids.device), torch.zeros_like(ids).long()
        ends = next(iter(metadata.values())).query_start_loc[1 : len(self.rows) + 1].long()
        row = torch.searchsorted(ends, torch.arange(len(ids), device=ids.device), right=True)
        place = self.slots[row], positions
        values = self.values[place].masked_fill(ids != self.num_token_id, math.nan)
        self.ids[place] = ids.long()  # vLLM has int32
        self.values[place] = values  # a word was chosen where a number could have been
        self.last = self.slots[:-1], positions[ends - 1]
        return values.masked_fill(values.isnan(), 0.0), self.runs[row]

    def before(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All ids and values [R,T] up to each request's last token, whether a position is a number, and that last
        position."""
        assert self.last is not None
        slots, last = self.last
        some = slots, slice(int(last.max()) + 1)
        values = self.values[some]
        return self.ids[some], values.nan_to_num(0.0), ~values.isnan(), last

    def write(self, facts: Tensor) -> None:
        """facts [R,F] float64 of the <NUM> that would come next; the first is its value."""
        assert self.last is not None
        slots, last = self.last
        place = slots, last + 1
        new = place[1] >= self.first[slots]  # else the prompt, or what was written before, is read in parts
        self.values[place] = facts[:, 0].where(new, self.values[place])
        found = torch.cat([torch.where(new, place[1], -1)[:, None], facts], 1)
        for row, state in self.rows.items():
            state.steps.append((found, row))

    def take(self, key: str, done: bool) -> list[list[float]]:
        """Facts decided for a request since the last call. done: remove the request."""
        state = self.kept.pop(key, None) if done else self.kept.get(key)
        if state is None:
            return []
        start, state.sent = state.sent, len(state.steps)
        return state.facts(start)


class NumbersWorker:
    """Further calls to vLLM's worker (`collective_rpc`)."""

    model_runner: Any
    vllm_config: Any

    def number_head(self, run: int) -> dict[str, Any]:
        """Facts about a run's number head for `empty_numbers`."""
        head = self.model_runner.model.runs[run].model.action.number_head
        return {"exact": head.exact, "names": list(head.names)}

    def numbers_of(self, key: str, done: bool) -> list[list[float]]:
        """`RequestNumbers.take`: [position, value, loc, scale, p_num, which] each."""
        return HERE[self.vllm_config.instance_id].take(key, done)
