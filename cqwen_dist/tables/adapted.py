"""Features of a base whose adapters learn together with a head: what a benchmark's heads with LoRA stand on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import pad_rows
from cqwen_dist.config import LoraConfig
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.backbone import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.tables.heads import READ, Stored
from cqwen_dist.training.parameter_groups import feature_members

LORA = LoraConfig(r=16, alpha=32)  # as `cqwen fit` has it
RATES, BATCH = (2e-4, 1e-3, 5e-3), 16


class Adapted:
    """z at the last token of prompts, standardised by what it is at the start on the rows to learn from.

    The base is as `cqwen fit` begins with it: numbers enter as numbers, adapters change nothing yet. Adapters, w_num
    and <NUM>'s row learn; the base's own weights do not. `still`: the features at the start.
    """

    rates, batch = RATES, BATCH

    def __init__(self, base: str, prompts: Sequence[str], train: np.ndarray, epochs: int) -> None:
        """base: a model's folder or hub name. train: indices of the rows to learn from. Raises `UserError`."""
        torch.manual_seed(0)  # w_num and the adapters
        tokenizer = NumericalAwareTokenizer.from_pretrained(base)
        model = CausalQwenModel.from_base_model(
            load_base(base, torch.float32, rows_for=tokenizer.rows_for),
            start="seed",
            num_token_id=tokenizer.num_token_id,
            num_row_init="digits",
            numerals=tokenizer.numeral_ids,
            w_num_scale=None if tokenizer.numeral_ids else 0.2,
            lora=LORA.model_dump(),
        )
        self.epochs, self.width = epochs, model.config.hidden_size
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.features = model.features.eval().requires_grad_(False).to(self._device)
        self.parameters = [member.parameter for member in feature_members(self.features)]
        for parameter in self.parameters:
            parameter.requires_grad_()
        self._start = [parameter.detach().clone() for parameter in self.parameters]
        self._rows, self._pad = [tokenizer.encode(prompt) for prompt in prompts], tokenizer.pad_token_id
        with torch.no_grad():
            z = torch.cat([self._z(some) for some in torch.arange(len(prompts)).split(READ)])
        self.still = Stored(z, train, floor=0.01 * float(z.square().mean().sqrt()))  # what is constant may move later

    def __call__(self, rows: Tensor) -> Tensor:
        """x [m,H] of rows [m], with gradients."""
        return (self._z(rows) - self.still.centre) / self.still.unit

    def begin(self) -> list[nn.Parameter]:
        """What learns, as it was at the start."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._start, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        return self.parameters

    def _z(self, rows: Tensor) -> Tensor:
        batch = pad_rows([self._rows[row] for row in rows.tolist()], self._pad, on_left=True)
        return self.features(*(part.to(self._device) for part in batch))[:, -1].float().cpu()
