"""The model in vLLM: vLLM's transformer of the base, with the embeddings, adapters and heads of one or more runs.

All runs share the transformer and its paged memory. A token is embedded by its request's run, goes through that run's
adapters, and its z into that run's heads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, safetensors_weights_iterator
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix

from cqwen_dist.config.trainable import is_lora
from cqwen_dist.tools.vllm.plugin import configs_of
from cqwen_dist.tools.vllm.request_numbers import HERE, RequestNumbers
from cqwen_dist.tools.vllm.served_run import ServedRun, add_adapters

FEATURES = "model.features."
BACKBONE, TABLE = f"{FEATURES}backbone.transformer.", f"{FEATURES}embedding.token_embedding."


class PagedCausalQwen(nn.Module):
    """vLLM's interface of a text model. Shape letters: N tokens of a step, R requests, V vocabulary, M runs."""

    gate: Tensor  # as in `RunAdapters`

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.instance = vllm_config.instance_id
        base = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=config.base_config, prefix=maybe_prefix(prefix, "base")
        )
        transformer: Any = base.model
        object.__setattr__(transformer, "base_model", transformer)  # as transformers' models have it; no submodule
        table, self.packed = transformer.embed_tokens, base.packed_modules_mapping
        self.runs: Any = nn.ModuleList()
        configs = configs_of(config)
        self.lora = [each.lora for each in configs]
        for each in map(copy.copy, configs):
            each.lora = None  # PEFT's adapters do not fit vLLM's maps, `RunAdapters` do
            transformer.embed_tokens = table
            self.runs.append(ServedRun(each, base))
        most = max(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        dtype = vllm_config.model_config.dtype
        self.register_buffer("gate", torch.zeros(most, len(self.runs), dtype=dtype), persistent=False)

    @property
    def numbers(self) -> RequestNumbers:
        """The values of this engine's requests."""
        return HERE[self.instance]

    def _embeddings(self, ids: Tensor, values: Tensor, runs: Tensor) -> Tensor:
        """ids, values, runs [N] -> e [N,H]."""
        first, *further = (run.model.features.embedding for run in self.runs)
        found: Tensor = first(ids, values)
        for place, embedding in enumerate(further, 1):
            found = torch.where((runs == place).unsqueeze(-1), embedding(ids, values), found)
        return found

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings without values, which vLLM asks for if it makes inputs by itself."""
        return self._embeddings(input_ids, torch.zeros_like(input_ids, dtype=torch.float64), input_ids * 0)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """ids, positions [N] -> z [N,H]."""
        values, runs = self.numbers.read(input_ids, positions)
        self.gate[: len(runs)] = runs.unsqueeze(-1) == torch.arange(len(self.runs), device=runs.device)
        embeddings = self._embeddings(input_ids, values, runs)
        return self.runs[0].model.transformer(None, positions, intermediate_tensors, inputs_embeds=embeddings)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """z [R,H] -> logits [R,V] by the heads of each request's run. The number that may come next is decided too."""
        numbers = self.numbers
        if numbers.last is None or len(numbers.rows) != len(hidden_states):  # vLLM measures memory
            logits, _ = self.runs[0](hidden_states)
            return logits
        states, before = [numbers.rows[row] for row in range(len(hidden_states))], numbers.before()
        found = []
        for place in sorted({state.run for state in states}):
            rows = [row for row, state in enumerate(states) if state.run == place]
            own = torch.tensor(rows, device=hidden_states.device)
            parts = self.runs[place](hidden_states[own], [states[row] for row in rows], [each[own] for each in before])
            found.append((own, *parts))
        order = torch.cat([own for own, _, _ in found]).argsort()
        numbers.write(torch.cat([facts for _, _, facts in found])[order])
        return torch.cat([logits for _, logits, _ in found])[order]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load exported folders, of which vLLM opens the first: its transformer takes the base's tensors of the first
        one, everything else is ours."""
        loaded = set[str]()
        transformer: Any = self.runs[0].model.transformer
        found = transformer.load_weights(self._take(0, weights, loaded))
        for place, run in list(enumerate(self.runs))[1:]:
            files = map(str, Path(run.config.name_or_path).glob("*.safetensors"))
            list(self._take(place, safetensors_weights_iterator([*files], use_tqdm_on_load=False), loaded))
        return loaded | {f"runs.0.{BACKBONE}{name}" for name in found}

    def _take(
        self, place: int, weights: Iterable[tuple[str, Tensor]], loaded: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Take what belongs to a run; of the first one give the base's tensors on, by the transformer's names."""
        own, lora, adapters = dict(self.runs[place].named_parameters()), self.lora[place], dict[str, Tensor]()
        for name, tensor in weights:
            if name.startswith(BACKBONE) and is_lora(name):
                adapters[name.removeprefix(BACKBONE)] = tensor
            elif name.startswith(BACKBONE):
                if place == 0:
                    yield name.removeprefix(BACKBONE).replace(".base_layer.", "."), tensor
            elif place == 0 or not name.startswith(TABLE):
                parameter = own[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
                loaded.add(f"runs.{place}.{name}")
        if lora:
            scale, transformer = lora["alpha"] / lora["r"], self.runs[0].model.transformer
            add_adapters(transformer, self.packed, place, scale, adapters, self.gate)
