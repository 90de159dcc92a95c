"""The trainable group of each parameter. Groups are the names under a stage's `train:`."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from cqwen_dist.config.trainable import feature_group, heads_group, is_magnitude, is_trainable
from cqwen_dist.heads.beside import BESIDE


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
    def is_of_candidates(self) -> bool:
        """Whether it is a row, bias or noise of candidates' scores."""
        return self.name.startswith("action.candidate_")

    @property
    def spread(self) -> bool:
        """Whether ranks with equal copies share moments and step (`optim`). True for all large parameters."""
        return self.has_rows or (self.group == "abduction" and self.parameter.ndim > 1)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices only, not to biases, C, b_noise or w_num."""
        return self.parameter.ndim > 1 and self.group != "embedding"


def feature_members(features: nn.Module, groups: Collection[str] = ()) -> list[Member]:
    """The parameters of the features that the engine trains. groups: all that any stage trains; they decide about the
    base's own parameters. All other feature parameters are frozen."""
    return [
        Member(name, parameter, str(feature_group(name)), "magnitude" if is_magnitude(name) else "")
        for name, parameter in features.named_parameters()
        if is_trainable(name, groups)
    ]


def head_members(heads: nn.ModuleDict) -> list[Member]:
    """The trainable parameters of abduction and action.

    P depends on b_cls and C only by their difference, so only C trains. The side network is fitted at the start
    and never trains.
    """
    scalar = bool(heads["action"].scalar_threshold)
    members = []
    for name, parameter in heads.named_parameters():
        if name.partition(".")[0] != BESIDE and name != "action.cls_bias":
            members.append(Member(name, parameter, heads_group(name), has_rows=has_rows(name, scalar)))
    return members


def has_rows(name: str, scalar_threshold: bool) -> bool:
    """Whether a head parameter, or its moment, has one row per word. scalar_threshold: all words have one C."""
    return name.startswith("action.cls_") or (name.startswith("action.threshold") and not scalar_threshold)
