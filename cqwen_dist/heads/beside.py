"""An optional side network that reads token ids and values directly, not through z.

At each position it returns g and h for the next number. The abduction network adds g to the location of U's number
dimensions and h to their log scale; the word dimensions do not change. The calibrated start fits it in closed form, and
training never changes it.

The core knows only this interface. The one implementation is the wide part (`tables/wide`); `wings` names it, and what
fits it (`wide_start.WideStart`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cqwen_dist.config.errors import UserError
from cqwen_dist.wings import from_wing

BESIDE = "wide"  # the part's name in the model, so in checkpoints; in a config the field with its size, 0 for no part
BESIDE_Z = 3  # columns after z: g rounded to z's dtype, the rounding remainder, and h


class BesideFit(NamedTuple):
    """A fit to n numbers. g is up to a constant, since the regression has an intercept."""

    tables: dict[str, Tensor]  # parameters by name, fp32
    folds: Sequence[int]  # [n]: fold of each number's text
    left_out: Tensor  # [n] float64: g for each number, out of fold
    spread: Tensor  # [n] float64: h, out of fold


class Beside(nn.Module):
    """The base class. In training mode, texts used for the fit get out-of-fold predictions. reads: the columns after z
    that `FeatureStack` makes for it; it reads z too if there are any.

    A subclass has `of` (config), `begin` (line ends) and `forward`, as `tables.wide.wide_part.WidePart` describes them.
    """

    of: Any
    begin: Any
    reads = 0

    def behind(
        self,
        z: Tensor,
        input_ids: Tensor | None,
        numeric_values: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        keep: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """z from `FeatureStack`, with g and h behind it: [...,H+BESIDE_Z+reads].

        A cache also keeps this network's state. Raises `UserError` for a cache that this model did not fill.
        """
        states = z if self.reads else None
        z, further = z.split([z.shape[-1] - self.reads, self.reads], -1)
        if input_ids is None:  # without ids the words are unknown
            return torch.cat([z, z.new_zeros(*z.shape[:-1], BESIDE_Z), further], -1)
        cache = past_key_values
        state = getattr(cache, "beside_state", None)
        if cache is not None and state is None and cache.get_seq_length() > input_ids.shape[1]:
            wrong = f"a cache without the {BESIDE} part's state"
            raise UserError("past_key_values", wrong, "one that this model filled")
        found, state = self(input_ids, numeric_values, position_ids, attention_mask, state, keep, states)
        if cache is not None:
            # In the memory of the first state: steps of fixed shapes read it where it was
            if (memory := getattr(cache, "beside_memory", None)) is None:
                cache.beside_memory = memory = state
            else:
                for old, new in zip(memory, state, strict=True):
                    old.copy_(new)
            cache.beside_state = memory
        return torch.cat([z, columns_beside_z(found.to(z.device), z.dtype), further], -1)


def make_beside(config: Any) -> Beside | None:
    """Build the side network named in a `CausalQwenConfig`, or None. Raises `UserError` if it is not installed."""
    if not getattr(config, BESIDE):
        return None
    known = Beside.__subclasses__()  # the code in an exported folder has the class in the same file
    kind: type[Beside] = known[0] if known else from_wing(f"model.{BESIDE}")
    return kind.of(config)


def before_beside(features: Tensor, hidden: int) -> Tensor:
    """The features as `FeatureStack` made them: the columns that `Beside.behind` added are left out. hidden: H."""
    return torch.cat([features[..., :hidden], features[..., hidden + BESIDE_Z :]], -1)


def columns_beside_z(found: Tensor, dtype: torch.dtype) -> Tensor:
    """g and h [2,...] fp32 -> [...,3] in dtype: two columns whose sum is g, to 16 bits in bf16, and h."""
    g, h = found
    rounded = g.to(dtype)
    return torch.stack([rounded, (g - rounded.float()).to(dtype), h.to(dtype)], -1)
