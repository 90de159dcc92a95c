"""Features from a base model for the benchmark heads: frozen, or with adapters that train together with a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.numbers.competitors import READ, Stored
from cqwen_dist.batch import pad_rows
from cqwen_dist.config import LoraConfig
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.run.files import written_whole
from cqwen_dist.training.parameter_groups import feature_members

LORA = LoraConfig(r=16, alpha=32)  # as in `cqwen fit`
RATE, BATCH = 5e-4, 16  # the adapters' in `cqwen fit`, which tunes none either
TOLD = 16 * READ  # rows between two progress lines, which are also saved together
Row = tuple[list[int], list[float]]  # ids, values


def products_in(precision: str, device: torch.device) -> torch.autocast:
    """A context for matrix products in bf16 or in fp32, which trains fp32 weights."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class StartingBase:
    """A base model as at the start of `cqwen fit`: numbers enter as values, and the adapters have no effect yet.

    parameters: the trainable ones, which are the adapters, w_num and the <NUM> row. All other weights are frozen.
    """

    def __init__(self, base: str, precision: str = "fp32") -> None:
        """base: a model folder or hub name. precision: fp32 or bf16, of frozen weights too. Raises `UserError`."""
        torch.manual_seed(0)  # for w_num and the adapters
        self.tokenizer = NumericalAwareTokenizer.from_pretrained(base)
        model = CausalQwenModel.from_base_model(
            load_base(base, dtype_of(precision), rows_for=self.tokenizer.rows_for),
            start="seed",
            num_token_id=self.tokenizer.num_token_id,
            num_row_init="digits",
            numerals=self.tokenizer.numeral_ids,
            w_num_scale=None,
            lora=LORA.model_dump(),
        )
        self.width = model.config.hidden_size
        self._device, self._precision = torch.device("cuda" if torch.cuda.is_available() else "cpu"), precision
        self.features = model.features.eval().requires_grad_(False).to(self._device)
        self.parameters = [member.parameter for member in feature_members(self.features)]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()
            parameter.requires_grad_()

    def encode(self, prompts: Sequence[str]) -> list[Row]:
        """Tokenises the prompts for `z`."""
        return [*self.tokenizer.encode_batch(prompts)]

    def z(self, rows: Sequence[Row]) -> Tensor:
        """z [m,H] fp32 (CPU) at the last token of each row, with gradients."""
        batch = pad_rows(rows, self.tokenizer.pad_token_id, on_left=True)
        with products_in(self._precision, self._device):
            return self.features(*(part.to(self._device) for part in batch))[:, -1].float().cpu()


class KeptZ:
    """z at the last token of each prompt from a `StartingBase`, cached in a file for all splits of a table."""

    def __init__(self, base: str, precision: str, file: Path, say: Callable[[str], None]) -> None:
        """base, precision: as in `StartingBase`."""
        self.name, self.precision, self.file, self.say = base, precision, file, say

    @cached_property
    def base(self) -> StartingBase:
        """Raises `UserError`."""
        return StartingBase(self.name, self.precision)

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """z [n,H] fp32."""
        keys = [sha256(f"{self.name}\n{self.precision}\n{prompt}".encode()).digest() for prompt in prompts]
        kept: dict[bytes, Tensor] = {}
        if self.file.is_file():
            found = load_file(self.file)
            kept = dict(zip(map(bytes, found["keys"].numpy()), found["z"], strict=True))
        unread = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in kept}
        new = dict(zip(unread, self.base.encode([*unread.values()]), strict=True)) if unread else {}
        # Sort by length, so that a batch needs little padding.
        order = sorted(new, key=lambda key: len(new[key][0]))
        for first in range(0, len(order), TOLD):
            self.say(f"  the base's z: {first:,} of {len(order):,} rows")
            for start in range(first, min(first + TOLD, len(order)), READ):
                some = order[start : start + READ]
                with torch.no_grad():
                    kept |= zip(some, self.base.z([new[key] for key in some]), strict=True)
            packed = torch.from_numpy(np.frombuffer(b"".join(kept), np.uint8).copy()).view(len(kept), -1)
            with written_whole(self.file) as draft:  # save often, as a table may take an hour
                save_file({"keys": packed, "z": torch.stack(list(kept.values()))}, draft)
        return torch.stack([kept[key] for key in keys])


class Adapted:
    """z at the last token of each prompt from a base with trainable adapters, standardised like `still`.

    still: z before training, standardised by the training rows.
    """

    rates, batch, once = (RATE,), BATCH, True

    def __init__(self, base: StartingBase, prompts: Sequence[str], z: Tensor, train: np.ndarray, epochs: int) -> None:
        """z [n,H]: z of the prompts before training. train: indices of the training rows."""
        self.epochs, self.width, self._base, self._rows = epochs, base.width, base, base.encode(prompts)
        self._start = [parameter.detach().clone() for parameter in base.parameters]
        # The floor keeps dimensions that are constant now, and may move in training, from being blown up.
        self.still = Stored(z, train, floor=0.01 * float(z.square().mean().sqrt()))

    def __call__(self, rows: Tensor) -> Tensor:
        """x [m,H] for rows [m], with gradients."""
        return (self._base.z([self._rows[row] for row in rows.tolist()]) - self.still.centre) / self.still.unit

    def begin(self) -> list[nn.Parameter]:
        """Resets the trainable parameters to their start and returns them."""
        with torch.no_grad():
            for parameter, value in zip(self._base.parameters, self._start, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        return self._base.parameters
