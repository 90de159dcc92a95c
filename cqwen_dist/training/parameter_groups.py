"""The trainable group of each parameter (groups are the `train:` names of a stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cqwen_dist.model.lora import is_lora, is_lora_b, is_magnitude

# The groups of the parameters of `Action`; its number head's are in `regression`.
# All parameters of another part of the heads are in the group of its name.
_ACTION = {
    "cls_weight": "classifier",
    "cls_bias": "classifier",
    "b_noise": "noise",
    "threshold": "thresholds",
}


@dataclass(frozen=True)
class Member:
    """A trainable parameter."""

    name: str
    parameter: nn.Parameter
    group: str
    kind: str = ""  # with its own optimizer settings within the group: LoRA's `B`, DoRA's `magnitude`

    @property
    def slot(self) -> str:
        """Group and kind. Members of a slot share the learning rate, the weight decay and Adam's step."""
        return f"{self.group}.{self.kind}" if self.kind else self.group

    @property
    def is_scale(self) -> bool:
        """Whether it is one of {b_scale, b_noise, C}."""
        return self.name in ("abduction.scale_net.bias", "action.b_noise", "action.threshold")

    @property
    def has_rows(self) -> bool:
        """Whether a rank has a part of its rows; other parameters of the heads are replicated."""
        return has_rows(self.name, self.parameter.shape)

    @property
    def spread(self) -> bool:
        """Whether ranks with equal copies share its moments and its step (`moments`): all that is large."""
        return self.has_rows or (self.group == "abduction" and self.parameter.ndim > 1)

    @property
    def decays(self) -> bool:
        """Only matrices have weight decay; not biases, C, b_noise or w_num."""
        return self.parameter.ndim > 1 and self.group != "embedding"


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
            members.append(Member(name, parameter, "lora", kind))
    return members


def head_members(heads: nn.Module, thresholds: str, train_class_bias: bool) -> list[Member]:
    """The trainable parameters of abduction and action.

    b_cls and C are redundant for P: by default only C trains. The wide part is fitted at the start and never trains.
    """
    fixed = {"action.cls_bias": not train_class_bias, "action.threshold": thresholds == "fixed"}
    members = []
    for name, parameter in heads.named_parameters():
        part, _, own_name = name.partition(".")
        if part != "wide" and not fixed.get(name):
            members.append(Member(name, parameter, _ACTION.get(own_name, "regression") if part == "action" else part))
    return members


def has_rows(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of the heads, or a moment of it, has a row for each word. A scalar C has none."""
    return name.startswith(("action.cls_", "action.threshold")) and len(shape) > 0
