"""Which parameter belongs to which trainable group (the `train:` names of a stage)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from cqwen_dist.model.lora import is_lora, is_lora_b, is_magnitude

# By the last parts of a parameter's name in `CausalQwenModel`.
_HEADS = {
    "abduction.loc_net.weight": ("abduction", False),
    "abduction.loc_net.bias": ("abduction", False),
    "abduction.scale_net.weight": ("abduction", False),
    "abduction.scale_net.bias": ("abduction", True),
    "action.cls_weight": ("classifier", False),
    "action.cls_bias": ("classifier", False),
    "action.b_noise": ("noise", True),
    "action.reg_weight": ("regression", False),
    "action.reg_bias": ("regression", False),
    "action.threshold": ("thresholds", True),
}


@dataclass(frozen=True)
class Member:
    """A trainable parameter: its name, its group, whether it is one of {b_scale, b_noise, C}, how it is spread."""

    name: str
    parameter: nn.Parameter
    group: str
    is_scale: bool
    spread: Literal["replicated", "rows"]
    kind: str = ""  # what is optimized apart within the group: LoRA's `B`, DoRA's `magnitude`

    @property
    def slot(self) -> str:
        """The group, and the kind within it: what shares a learning rate, a weight decay and Adam's step."""
        return f"{self.group}.{self.kind}" if self.kind else self.group

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices only; never for biases, C, b_noise or w_num."""
        return self.parameter.ndim > 1


def feature_members(features: nn.Module, separate_b: bool = False) -> list[Member]:
    """w_num and <NUM>'s row (`embedding`) and the adapters (`lora`); everything else of the features is frozen.

    separate_b: the B matrices have a learning rate of their own (LoRA+).
    """
    members = []
    for name, parameter in features.named_parameters():
        if name in ("embedding.w_num", "embedding.num_row"):
            members.append(Member(name, parameter, "embedding", False, "replicated"))
        elif is_lora(name):
            kind = "magnitude" if is_magnitude(name) else "B" if separate_b and is_lora_b(name) else ""
            members.append(Member(name, parameter, "lora", False, "replicated", kind))
    return members


def head_members(heads: nn.Module, thresholds: str, train_class_bias: bool) -> list[Member]:
    """The trainable parameters of abduction and action. b_cls and C are redundant for P: one of them by default."""
    members = []
    for name, parameter in heads.named_parameters():
        group, is_scale = _HEADS.get(name) or (name.split(".")[0], False)  # another abduction has more layers
        if name == "action.cls_bias" and not train_class_bias:
            continue
        if name == "action.threshold" and thresholds == "fixed":
            continue
        by_rows = name in ("action.cls_weight", "action.cls_bias") or (
            name == "action.threshold" and parameter.ndim == 1
        )
        members.append(Member(name, parameter, group, is_scale, "rows" if by_rows else "replicated"))
    return members
