"""The result of `AutoModel`: the features, for extraction and for heads of other libraries."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.model.backbone import cache_name, seen_inside
from cqwen_dist.model.causal_lm import CausalQwenForCausalLM


class CausalQwenFeatures(CausalQwenForCausalLM):
    """The same weights with a different forward pass: last_hidden_state is z [B,T,H], as other models' AutoModel has
    it."""

    @classmethod
    def can_generate(cls) -> bool:
        """Features write nothing."""
        return False

    def generate(self, *args: Any, **given: Any) -> Any:
        """Raises `UserError`."""
        raise UserError("generate", Said("features, which have no words"), "AutoModelForCausalLM")

    def forward(  # type: ignore[override, unused-ignore]
        self,
        input_ids: Tensor | None = None,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Any = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """[B,T] each; the arguments are those of `CausalQwenForCausalLM.forward`. Raises `UserError`."""
        self._check(input_ids, numeric_values, inputs_embeds)
        cache = self._cache_of(past_key_values if cache is None else cache, use_cache)
        asked = self._asked(output_hidden_states=output_hidden_states, output_attentions=output_attentions)
        given: Any = inputs_embeds if input_ids is None else input_ids
        if numeric_values is None:
            numeric_values = torch.zeros(given.shape[:2], dtype=torch.float64, device=given.device)
        with seen_inside(self.model.transformer, **asked) as seen:
            z = self.model.features(
                input_ids,
                numeric_values,
                attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
            )[..., : self.config.hidden_size]
        inside = {**seen, cache_name(self.model.transformer): cache}
        found: Any = self._answer(BaseModelOutputWithPast(last_hidden_state=z, **inside), return_dict)
        return found
