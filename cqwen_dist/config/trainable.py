"""What can train: the groups under a stage's `train:`. Only this module names the parameters of the features' groups.

The schema, the engine, checkpoints, the KL's start and the plan ask here. So an entry in `FEATURE_GROUPS` is all that a
further group of the features needs. The heads' groups are told by `heads_group`.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

# `heads` in a stage's `train` means these five.
HEADS = ("abduction", "classifier", "noise", "regression", "thresholds")
OF_WORDS = frozenset({"classifier", "thresholds"})  # those that only the words' loss trains
DENSE = 0.012  # U moves by about this share of a feature's size in an Adam step (docs/training.md)
_ACTION = {"cls_weight": "classifier", "cls_bias": "classifier", "b_noise": "noise", "threshold": "thresholds"}


@dataclass(frozen=True)
class FeatureGroup:
    """A trainable group of the features, that is of the embedding and the backbone."""

    names: str  # a regular expression that is found in the names of its parameters, and in no other of the features
    title: str  # in a plan
    count: Callable[[Any, Any], int]  # (`Config`, `sizes.architecture.Architecture`) -> number of its parameters
    added: bool = False  # whether the package adds them to the base; a base's own belong only where they train
    always: bool = False  # whether every model has them, even if no stage trains them


def _adapters(config: Any, base: Any) -> int:
    lora = config.model.lora
    return int(base.lora_parameters(lora.r, lora.target_modules, lora.dora))


FEATURE_GROUPS: dict[str, FeatureGroup] = {
    "embedding": FeatureGroup(
        names=r"^embedding\.(w_num|num_row)$",
        title="embedding of numbers",
        count=lambda config, base: 2 * base.hidden,
        added=True,
        always=True,
    ),
    "lora": FeatureGroup(names=r"\.lora_", title="LoRA", count=_adapters, added=True),
}
GROUPS = ("embedding", *HEADS, *(name for name in FEATURE_GROUPS if name != "embedding"))  # as pages list them


def feature_group(name: str) -> str | None:
    """The group of a parameter of the features, by its name; None if it never trains."""
    return next((group for group, each in FEATURE_GROUPS.items() if re.search(each.names, name)), None)


def is_trainable(name: str, groups: Collection[str]) -> bool:
    """Whether the run has this parameter of the features in its engine and its checkpoints. groups: those that ever
    train."""
    return is_added(name) or feature_group(name) in groups


def is_added(name: str) -> bool:
    """Whether this package adds a parameter of the features to the base."""
    group = feature_group(name)
    return group is not None and FEATURE_GROUPS[group].added


def is_lora(name: str) -> bool:
    """Whether a parameter name belongs to an adapter."""
    return feature_group(name) == "lora"


def is_lora_b(name: str) -> bool:
    """Whether this is a B matrix, which has a separate learning rate in LoRA+."""
    return ".lora_B." in name or ".lora_embedding_B." in name


def is_magnitude(name: str) -> bool:
    """Whether this is a DoRA magnitude, a vector without weight decay."""
    return ".lora_magnitude_vector." in name


def trains_features(groups: Collection[str]) -> bool:
    """Whether gradients run through the backbone while these groups train."""
    return not FEATURE_GROUPS.keys().isdisjoint(groups)


def feature_counts(config: Any, base: Any, groups: Collection[str]) -> dict[str, int]:
    """Group -> number of its parameters. config, base: a `Config`, an `Architecture`. groups: all that ever train."""
    return {name: each.count(config, base) for name, each in FEATURE_GROUPS.items() if each.always or name in groups}


def heads_group(name: str) -> str:
    """The group of a parameter of the heads, by its name (`action.b_noise`). Another head has a group of its name."""
    part, _, own = name.partition(".")
    return _ACTION.get(own, "regression") if part == "action" else part


def dense_rate(hidden: int) -> float:
    """Peak rate of W_loc, a dense map [H,H] that starts at the identity: a step moves every entry by the rate."""
    return DENSE / hidden


def group_rates(hidden: int) -> dict[str, float]:
    """Peak rates of the heads' other groups, if W_loc has `dense_rate` (docs/training.md, Rates)."""
    rate = dense_rate(hidden)
    return {"classifier": rate / 10, "regression": rate * 10, "thresholds": 1e-3}
