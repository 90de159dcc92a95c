"""Module 1: token embedding plus number (seed S0 section 1)."""

from collections.abc import Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.heads.numerals import next_character, shown_ids
from cqwen_dist.heads.precision import keeping_fp32


def phi(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """sign(v) ln(1+|v|) (S0 1.3), computed in float64, rounded to dtype; phi(0) = 0 exactly."""
    wide = values.double()
    return wide.abs().log1p().copysign(wide).to(dtype)


def scale_of(table: nn.Module) -> float:
    """The factor that a base's token table applies to its rows."""
    return float(getattr(table, "scalar_embed_scale", 1.0))


class NumericalAwareEmbedding(nn.Module):
    """e_i = embed(x_i) + phi(v_i) w_num at each position, without a branch (S0 1.3).

    phi(0) = 0, so text positions equal the token embedding exactly. The table stays frozen, as it may be tied to the
    base's output head. So the `<NUM>` row is trained as the difference `num_row` from its inherited row.
    """

    inside = local()  # .reading: whether this thread reads a table for its owner; PEFT's copies of a table see it too

    def __init__(
        self,
        token_embedding: nn.Embedding,
        hidden_size: int,
        num_token_id: int | None = None,
        digit_rows: Sequence[int] = (),
    ) -> None:
        """w_num [H] starts as N(0, 1/H) per entry (std 1/sqrt(H), S3 4 step 1). digit_rows: the tokens of `CHARACTERS`,
        if digits are kept in view: then <NUM> has the row of its numeral's first character, if there is one."""
        super().__init__()
        self.take_table(token_embedding)
        self.num_token_id = num_token_id
        self.digit_rows = tuple(digit_rows)
        self._rows: Tensor | None = None  # `digit_rows` on the device
        self.w_num = nn.Parameter(torch.randn(hidden_size) * hidden_size**-0.5)
        self.num_row = nn.Parameter(torch.zeros(hidden_size))
        self.numeral_row = torch.zeros(hidden_size)  # `num_row` with which the base by itself is measured

    def take_table(self, table: nn.Module) -> None:
        """Use this token table. Others who call it, as `get_input_embeddings()`, read <NUM>'s trained row there."""
        for key, hook in list(table._forward_hooks.items()):
            if getattr(hook, "__func__", None) is NumericalAwareEmbedding._with_num_row:  # of the table's former owner
                del table._forward_hooks[key]
        table.register_forward_hook(self._with_num_row)
        self.token_embedding = table

    def _with_num_row(self, table: nn.Module, given: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """Rows of the table [...,H] with `num_row` at <NUM>. `forward` adds it itself, in fp32 and with the number."""
        if getattr(self.inside, "reading", False) or self.num_token_id is None:
            return rows
        num = (given[0] == self.num_token_id).unsqueeze(-1)
        return torch.where(num, rows.float() + self.num_row.float(), rows.float()).to(rows.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for part in self.children() if recurse else ():
            part._apply(fn)
        return super()._apply(keeping_fp32(fn), recurse=False)

    def rows_on(self, device: torch.device) -> Tensor:
        """`digit_rows` on a device. They stay there: a copy from the host in each step would wait."""
        if self._rows is None or self._rows.device != device:
            self._rows = torch.tensor(self.digit_rows, device=device)
        return self._rows

    def next_digits(self, is_number: Tensor, values: Tensor, last: Tensor) -> Tensor:
        """The tokens [R] that have to follow texts inside a numeral, -1 elsewhere. Arguments as `next_character`."""
        code = next_character(is_number, values, last)
        return self.rows_on(code.device)[code.clamp(min=0)].masked_fill(code < 0, -1)

    def forward(self, input_ids: Tensor | None, numeric_values: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """input_ids [B,T] int64, numeric_values [B,T] (0 at text) -> [B,T,H] in the table's dtype.

        inputs_embeds [B,T,H]: used instead of ids. They contain `num_row` if the token table made them.
        """
        self.inside.reading = True
        try:
            ids = input_ids
            if ids is not None and self.num_token_id is not None and self.digit_rows:
                ids = shown_ids(ids, numeric_values, self.num_token_id, self.rows_on(ids.device))
            base = self.token_embedding(ids) if inputs_embeds is None else inputs_embeds
        finally:
            self.inside.reading = False
        dtype = torch.promote_types(self.w_num.dtype, torch.float32)
        number = phi(numeric_values, dtype).unsqueeze(-1) * self.w_num.to(dtype)
        if self.num_token_id is not None and input_ids is not None:
            number = number.addcmul((input_ids == self.num_token_id).unsqueeze(-1), self.num_row.to(dtype))
        return (base.to(dtype) + number).to(base.dtype)
