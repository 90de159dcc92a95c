"""Module 1: a token's embedding plus its number (seed S0 section 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def phi(values: Tensor) -> Tensor:
    """sign(v) ln(1+|v|) (S0 1.3), in float64, returned as fp32; phi(0) = 0 exactly."""
    wide = values.double()
    return (wide.sign() * wide.abs().log1p()).float()


class NumericalAwareEmbedding(nn.Module):
    """e_i = embed(x_i) + phi(v_i) w_num at every position, no branch (S0 1.3).

    phi(0) = 0, so text positions are exactly the token embedding. The table stays frozen (it may be tied to the base's
    output head). `<NUM>`'s row is trained as the difference `num_row` from its inherited row.
    """

    def __init__(
        self,
        token_embedding: nn.Embedding,
        hidden_size: int,
        num_token_id: int | None = None,
        w_num_scale: float = 1.0,
    ) -> None:
        """w_num starts as N(0, 1/H) per entry (std 1/sqrt(H), S3 4 step 1) times w_num_scale."""
        super().__init__()
        self.token_embedding = token_embedding
        self.num_token_id = num_token_id
        self.w_num = nn.Parameter(torch.randn(hidden_size) * (w_num_scale * hidden_size**-0.5))
        self.num_row = nn.Parameter(torch.zeros(hidden_size))
        self._instead: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def using(self, w_num: Tensor, num_row: Tensor) -> Iterator[None]:
        """Inside, these [H] replace the parameters (by their values at the start, for instance)."""
        self._instead = (w_num, num_row)
        try:
            yield
        finally:
            self._instead = None

    def forward(self, input_ids: Tensor | None, numeric_values: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """input_ids [B,T] int64, numeric_values [B,T] (0 at text) -> [B,T,H] in the table's dtype.

        inputs_embeds [B,T,H]: instead of ids; phi(v) w_num is added, but not `num_row`, as <NUM>'s places are unknown.
        """
        base = self.token_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        w_num, num_row = (self.w_num, self.num_row) if self._instead is None else self._instead
        number = phi(numeric_values).unsqueeze(-1) * w_num.float()
        if self.num_token_id is not None and input_ids is not None:
            number = number + (input_ids == self.num_token_id).unsqueeze(-1) * num_row.float()
        return (base.float() + number).to(base.dtype)
