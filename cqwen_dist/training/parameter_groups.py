"""The trainable group of each parameter. Groups are the names under a stage's `train:`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cqwen_dist.heads.beside import BESIDE
from cqwen_dist.model.lora import is_lora, is_magnitude

# Groups of `Action`'s parameters; its number head is in `regression`. Other heads have a group of their name.
_ACTION = {"cls_weight": "classifier", "cls_bias": "classifier", "b_noise": "noise", "threshold": "thresholds"}


@dataclass(frozen=True)
class Member:
    """A trainable parameter."""

    name: str
    parameter: nn.Parameter
    group: str
    kind: str = ""  # a part of the group with separate optimizer settings: DoRA's `magnitude`
    has_rows: bool = False  # whether each rank has a part of the rows; other head parameters are replicated

    @property
    def slot(self) -> str:
        """Group and kind. Members of a slot share learning rate, weight decay and Adam step."""
        return f"{self.group}.{self.kind}" if self.kind else self.group

    @property
    def is_scale(self) -> bool:
        """Whether this is b_scale, b_noise or C."""
        return self.name in ("abduction.scale_net.bias", "action.b_noise", "action.threshold")

    @property
    def spread(self) -> bool:
        """Whether ranks with equal copies share moments and step (`moments`). True for all large parameters."""
        return self.has_rows or (self.group == "abduction" and self.parameter.ndim > 1)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices only, not to biases, C, b_noise or w_num."""
        return self.parameter.ndim > 1 and self.group != "embedding"


def feature_members(features: nn.Module) -> list[Member]:
    """w_num and the <NUM> row (`embedding`) and adapters (`lora`). All other feature parameters are frozen."""
    members = []
    for name, parameter in features.named_parameters():
        if name in ("embedding.w_num", "embedding.num_row"):
            members.append(Member(name, parameter, "embedding"))
        elif is_lora(name):
            members.append(Member(name, parameter, "lora", "magnitude" if is_magnitude(name) else ""))
    return members


def head_members(heads: nn.ModuleDict, thresholds: str, train_class_bias: bool) -> list[Member]:
    """The trainable parameters of abduction and action.

    P depends on b_cls and C only by their difference, so by default only C trains. The side network is
    fitted at the start and never trains.
    """
    fixed = {"action.cls_bias": not train_class_bias, "action.threshold": thresholds == "fixed"}
    scalar = bool(heads["action"].scalar_threshold)
    members = []
    for name, parameter in heads.named_parameters():
        part, _, own_name = name.partition(".")
        if part != BESIDE and not fixed.get(name):
            group = _ACTION.get(own_name, "regression") if part == "action" else part
            members.append(Member(name, parameter, group, has_rows=has_rows(name, scalar)))
    return members


def has_rows(name: str, scalar_threshold: bool) -> bool:
    """Whether a head parameter, or its moment, has one row per word. scalar_threshold: all words have one C."""
    return name.startswith("action.cls_") or (name.startswith("action.threshold") and not scalar_threshold)
