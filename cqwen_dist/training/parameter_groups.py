"""The trainable group of each parameter (groups are the `train:` names of a stage)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from cqwen_dist.model.lora import is_lora, is_lora_b, is_magnitude

# (group, whether it is one of {b_scale, b_noise, C}) by a parameter's name in `CausalQwenModel`.
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
    """A trainable parameter."""

    name: str
    parameter: nn.Parameter
    group: str
    is_scale: bool = False  # one of {b_scale, b_noise, C}
    spread: Literal["replicated", "rows"] = "replicated"
    kind: str = ""  # with its own optimizer settings within the group: LoRA's `B`, DoRA's `magnitude`

    @property
    def slot(self) -> str:
        """Group and kind. Members of a slot share the learning rate, the weight decay and Adam's step."""
        return f"{self.group}.{self.kind}" if self.kind else self.group

    @property
    def decays(self) -> bool:
        """Only matrices have weight decay; not biases, C, b_noise or w_num."""
        return self.parameter.ndim > 1


def feature_members(features: nn.Module, separate_b: bool = False) -> list[Member]:
    """w_num and <NUM>'s row (`embedding`) and the adapters (`lora`); the other features are frozen.

    separate_b: the B matrices have their own learning rate (LoRA+).
    """
    members = []
    for name, parameter in features.named_parameters():
        if name in ("embedding.w_num", "embedding.num_row"):
            members.append(Member(name, parameter, "embedding"))
        elif is_lora(name):
            kind = "magnitude" if is_magnitude(name) else "B" if separate_b and is_lora_b(name) else ""
            members.append(Member(name, parameter, "lora", kind=kind))
    return members


def head_members(heads: nn.Module, thresholds: str, train_class_bias: bool) -> list[Member]:
    """The trainable parameters of abduction and action. b_cls and C are redundant for P: by default only C trains. The
    wide part is fitted at the start and never trains."""
    members = []
    for name, parameter in heads.named_parameters():
        group, is_scale = _HEADS.get(name) or (name.split(".")[0], False)  # another abduction has more layers
        if group == "wide" or (name == "action.cls_bias" and not train_class_bias):
            continue
        if name == "action.threshold" and thresholds == "fixed":
            continue
        members.append(Member(name, parameter, group, is_scale, "rows" if has_rows(name, parameter) else "replicated"))
    return members


def has_rows(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of the heads has a row for each word."""
    return name in ("action.cls_weight", "action.cls_bias") or (name == "action.threshold" and parameter.ndim == 1)
