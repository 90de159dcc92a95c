"""The model in vLLM: vLLM's transformer of the base, with our embedding and our heads around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix

from cqwen_dist.generate.modes import ovr_logits, softmax_logits
from cqwen_dist.generate.numbers import POWERS, written_values
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.number_head import Decision
from cqwen_dist.heads.numerals import only
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import all_scores
from cqwen_dist.ops.ovr.scores import prob_of
from cqwen_dist.tools.vllm.request_numbers import HERE, RequestNumbers

BACKBONE = "model.features.backbone.transformer."


class PagedCausalQwen(nn.Module):
    """vLLM's interface of a text model. Shape letters: N tokens of a step, R requests, V vocabulary."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.instance = vllm_config.instance_id
        base = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=config.base_config, prefix=maybe_prefix(prefix, "base")
        )
        transformer: Any = base.model
        object.__setattr__(transformer, "base_model", transformer)  # as transformers' models have it; no submodule
        self.model = CausalQwenModel(config, base=base)
        self.intervals = Intervals.from_dict(config.calibration)
        self.powers = POWERS.to(self.model.action.cls_weight.device)

    @property
    def numbers(self) -> RequestNumbers:
        """The values of this engine's requests."""
        return HERE[self.instance]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings without values, which vLLM asks for if it makes inputs by itself."""
        return self.model.features.embedding(input_ids, torch.zeros_like(input_ids, dtype=torch.float64))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """ids, positions [N] -> z [N,H]."""
        values = self.numbers.read(input_ids, positions)
        embeddings = self.model.features.embedding(input_ids, values)
        return self.model.transformer(None, positions, intermediate_tensors, inputs_embeds=embeddings)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """z [R,H] -> log P of each word [R,V], or loc_S in mode compatible. The number that could come next is decided
        too. The largest logit is the word of `generate` in modes standard and compatible."""
        action, numbers = self.model.action, self.numbers
        u = self.model.abduction(hidden_states)
        u_prime = Cauchy(*action.add_noise(Cauchy(u.loc.float(), u.scale.float())))
        seen = action.word_part(u_prime).to(action.cls_weight.dtype)
        head = action.word_head(int(self.config.used_rows))
        logits = ovr_logits(*all_scores(seen, head.take(slice(0, head.rows))), action.rows)
        rows = numbers.rows if numbers.last is not None and len(numbers.rows) == len(logits) else {}
        softmax = [row for row, state in rows.items() if state.mode == "compatible"]
        if softmax:
            loc = action.word_head().loc(Cauchy(seen.loc[softmax], seen.scale[softmax]))
            logits[softmax] = softmax_logits(loc, self.config.added_from)
        num_ids = torch.full((len(logits),), int(self.config.num_token_id), device=logits.device)
        words = self.config.learns_words  # else nothing but a number can follow
        if rows:
            p_num = prob_of(seen, action.word_head(), num_ids) if words else torch.ones_like(u_prime.loc[:, 0])
            self._decide(logits, u_prime, p_num)
        return logits if words else only(logits, num_ids)

    def _decide(self, logits: Tensor, u_prime: Cauchy, p_num: Tensor) -> None:
        """Decide the number of each request [R], if one comes next, and put it into the table; force the characters of
        numerals in logits [R,V]."""
        numbers, head, target = self.numbers, self.model.action.number_head, self.model.target
        ids, values, is_number, last = numbers.before()
        embedding = self.model.features.embedding
        if embedding.digit_rows:  # inside a numeral only its next character may follow
            logits.copy_(only(logits, embedding.next_digits(is_number, values, last)))
        positions = torch.arange(values.shape[1], device=last.device).expand_as(values)
        at = torch.arange(len(last), device=last.device) * values.shape[1] + last
        decision = head.decide(u_prime, head.memory(ids, is_number, values, positions, at), self.intervals.bar)
        value = torch.zeros_like(values[:, 0])
        for digits in {state.digits for state in numbers.rows.values()}:
            own = torch.tensor(
                [row for row, state in numbers.rows.items() if state.digits == digits], device=last.device
            )
            exact = None if decision.exact is None else decision.exact[own]
            some = Decision(decision.y._replace(loc=decision.y.loc[own], scale=decision.y.scale[own]), exact)
            value[own] = written_values(some, target, self.intervals, digits, self.powers)
        facts = [*decision.y, self.intervals.words.shown(p_num.double()), decision.written]
        columns = [torch.zeros_like(value) if each is None else each.double() for each in facts]
        numbers.write(value, torch.stack(columns, 1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load an exported folder: vLLM's transformer takes the base's tensors, everything else is ours."""
        own, loaded = dict(self.named_parameters()), set[str]()

        def of_backbone() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(BACKBONE):
                    yield name.removeprefix(BACKBONE), tensor
                    continue
                parameter = own[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
                loaded.add(name)

        transformer: Any = self.model.transformer
        found = {BACKBONE + name for name in transformer.load_weights(of_backbone())}
        return found | loaded
