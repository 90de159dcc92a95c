"""The model's modules put together, for a step, an evaluation and generation (seed S2 section 5).

input_ids, numeric_values --FeatureStack--> z [B,T,H] --AbductionNetwork--> U [B,T,C]
                                                      --ActionNetwork--> S [B,T,V] and Y [B,T]
`model.causal_qwen` makes them from a base or a config.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.beside import BESIDE, Beside
from cqwen_dist.heads.precision import at_hand, keeping_fp32
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.backbone import WITHIN_TEXTS, FeatureExtractionNetwork
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.depths import states_seen, with_means
from cqwen_dist.model.embedding import NumericalAwareEmbedding
from cqwen_dist.ops.cauchy import Cauchy


class FeatureStack(nn.Module):
    """Modules 1 and 2: ids and values to features. In training DeepSpeed wraps this module, but not the heads."""

    def __init__(self, embedding: NumericalAwareEmbedding, backbone: FeatureExtractionNetwork, depths: int = 0) -> None:
        """depths: of the layers whose states and means come after z (`model.depths`)."""
        super().__init__()
        self.depths = depths
        self.embedding = embedding
        self.backbone = backbone

    def forward(
        self,
        input_ids: Tensor | None,
        numeric_values: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        keep: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        texts: Any = None,
    ) -> Tensor:
        """[B,T] each -> z [B,T,H], with depths [B,T,2*depths*H]; with keep [N] (indices into B*T) only there, [N,...].

        inputs_embeds [B,T,H]: used instead of input_ids (`NumericalAwareEmbedding`). texts: as in
        `FeatureExtractionNetwork`.
        """
        embeddings = self.embedding(input_ids, numeric_values, inputs_embeds)
        with states_seen(self.backbone.transformer, self.depths) as states:
            z = self.backbone(
                embeddings, attention_mask, position_ids=position_ids, past_key_values=past_key_values, texts=texts
            )
        if self.depths:
            z = with_means([z, *states], position_ids, attention_mask, past_key_values)
        return z if keep is None else z.flatten(0, 1).index_select(0, keep)

    @contextmanager
    def using(self, instead: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, these tensors are read in place of the parameters of these names. Only without gradient.

        They are exchanged while the module that has them runs: ZeRO-3 gathers its parameters before that, and releases
        them after that.
        """
        with ExitStack() as stack:
            for name, value in instead.items():
                owner, _, own = name.rpartition(".")
                module, held = self.get_submodule(owner), [value]

                def exchange(module: Any, *given: Any, own: str = own, held: list[Tensor] = held) -> None:
                    parameter = getattr(module, own)
                    parameter.data, held[0] = held[0], parameter.data

                stack.enter_context(module.register_forward_pre_hook(exchange))
                stack.enter_context(module.register_forward_hook(exchange, prepend=True, always_call=True))
            yield


class CausalModules(nn.Module):
    """(input_ids, numeric_values) -> (loc_S, scale_S, loc_Y, scale_Y)."""

    def __init__(
        self,
        config: CausalQwenConfig,
        features: FeatureStack,
        abduction: Any,
        beside: Beside | None,
        action: ActionNetwork,
    ) -> None:
        """abduction: an `Abduction` (`heads.abduction`)."""
        super().__init__()
        self.config = config
        self.features = features
        self.abduction = abduction
        self.add_module(BESIDE, beside)
        self.action = action

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for name, part in self.named_children() if recurse else ():
            part._apply(fn if name == "features" else keeping_fp32(fn))
        return super()._apply(fn, recurse=False)

    @property
    def transformer(self) -> nn.Module:
        """The transformer of the base, with adapters."""
        return self.features.backbone.transformer

    @property
    def heads(self) -> dict[str, nn.Module]:
        """All modules after the features, by name."""
        return {name: part for name in ("abduction", "action", BESIDE) if (part := getattr(self, name)) is not None}

    @property
    def beside(self) -> Beside | None:
        """The side network, if there is one."""
        part: Beside | None = getattr(self, BESIDE)
        return part

    @property
    def target(self) -> TargetTransform:
        """The unit of Y."""
        return TargetTransform(**self.config.target)

    def kept_features(self, batch: Batch, keep: Tensor, features: Callable[..., Tensor] | None = None) -> Tensor:
        """Inputs of the abduction [N,feature_size] at the positions `keep` [N] of a training batch (`batch.kept`).

        features: called in place of the model's own `FeatureStack`. No attention mask is needed: position_ids that
        restart separate packed documents (`data.collate`), and no real token attends to padding on its right.
        """
        run = self.features if features is None else features
        transformer: Any = self.transformer
        texts = batch.texts if transformer.config._attn_implementation == WITHIN_TEXTS else None
        z = run(batch.input_ids, batch.numeric_values, None, batch.position_ids, keep=keep, texts=texts)
        return self.with_beside(z, batch, keep)

    def with_beside(self, z: Tensor, batch: Batch, keep: Tensor) -> Tensor:
        """z of `FeatureStack` with the columns of `Beside.behind`, if any, for the positions `keep` of a training
        batch."""
        if self.beside is None:
            return z
        return self.beside.behind(z, batch.input_ids, batch.numeric_values, None, batch.position_ids, keep=keep)

    def infer(
        self,
        input_ids: Tensor | None,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **context: Any,
    ) -> Cauchy:
        """U at all positions [B,T,C]. context: position_ids, past_key_values, keep, inputs_embeds."""
        if numeric_values is None:
            at = context["inputs_embeds"][..., 0] if input_ids is None else input_ids
            numeric_values = torch.zeros(at.shape, dtype=torch.float64, device=at.device)
        features = self.features(input_ids, numeric_values, attention_mask, **context)
        # Modules after z need fp32, also under a caller's autocast
        with torch.autocast(features.device.type, enabled=False):
            if self.beside is not None:
                features = self.beside.behind(features, input_ids, numeric_values, attention_mask, **context)
            with at_hand(self.abduction):
                u = self.abduction(features)
                return Cauchy(*(part.to(torch.promote_types(part.dtype, torch.float32)) for part in u))

    def forward(
        self,
        input_ids: Tensor,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **foreign: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B,T] each -> loc_S, scale_S [B,T,V], loc_Y, scale_Y [B,T] (S2 section 5), all fp32.

        Y is in the target's unit. Materialises [B,T,V]; training uses `heads.fused_loss` instead.
        Raises `UserError` for foreign arguments, which TRL's trainers give.
        """
        if foreign:
            found = Said(f"a trainer that wants hidden states for a softmax ({', '.join(sorted(foreign))})")
            raise UserError("trainer", found, "cqwen train, or transformers' Trainer")
        u = self.infer(input_ids, numeric_values, attention_mask)
        return self.action(u.loc, u.scale)
