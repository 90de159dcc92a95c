"""Module 2: the transformer of the base, fed with embeddings (seed S0 section 2)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

WITHIN_TEXTS = "cqwen_varlen"  # the name under which `model.varlen` registers its attention with transformers


class FeatureExtractionNetwork(nn.Module):
    """z = Transformer(e): the transformer of the base, fed with `inputs_embeds`.

    The token table belongs to `NumericalAwareEmbedding`.
    """

    def __init__(self, qwen_model: PreTrainedModel) -> None:
        """qwen_model: a transformer, or a causal model, of which only the transformer is kept (S2 3.2)."""
        super().__init__()
        self.transformer = qwen_model.base_model
        self._cache = cache_name(self.transformer)
        self.spread: Any = None  # runs attention over the positions of all ranks (`parallel.mappings`)

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        texts: Any = None,
    ) -> Tensor:
        """embeddings [B,T,H], attention_mask [B,T] -> z [B,T,H], the last hidden state after the final norm.

        past_key_values: a transformers cache, extended in place. texts: the `Texts` of the batch, for attention within
        each text (`model.varlen`).
        """
        within = {} if texts is None else {"texts": texts, "spread": self.spread}
        if texts is not None:  # transformers passes on a 4-dimensional mask, so it does not build one
            attention_mask = embeddings.new_empty(0, 0, 0, 0)
        return self.transformer(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=past_key_values is not None,
            **{self._cache: past_key_values},
            **within,
        ).last_hidden_state


def cache_name(transformer: nn.Module) -> str:
    """Name of the cache argument of a transformers model: past_key_values, renamed to cache in 5.24."""
    return "cache" if "cache" in inspect.signature(transformer.forward).parameters else "past_key_values"


@contextmanager
def seen_inside(transformer: nn.Module, **asked: Any) -> Iterator[dict[str, Any]]:
    """Inside, calls of the transformer write the requested outputs into the dict, None for what it does not show.

    output_hidden_states gives hidden_states, [B,T,H] each (embeddings, then each layer; the last is z).
    output_attentions gives attentions, [B,heads,T,T] for each layer.
    """
    seen: dict[str, Any] = {}
    if not asked:  # hooks would break a compiled graph
        yield seen
        return
    names = [each.removeprefix("output_") for each in asked]
    ask = transformer.register_forward_pre_hook(lambda _, args, given: (args, {**given, **asked}), with_kwargs=True)
    see = transformer.register_forward_hook(lambda _, args, output: seen.update({n: output.get(n) for n in names}))
    with ask, see:
        yield seen


@contextmanager
def adapters_disabled(transformer: nn.Module) -> Iterator[None]:
    """Inside, all adapters are bypassed, which gives the outputs of the base."""
    # By PEFT's own switch, as an export without adapters does not need PEFT
    layers: list[Any] = [m for m in transformer.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's enable_adapters would also toggle requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
