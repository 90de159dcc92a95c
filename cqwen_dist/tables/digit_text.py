"""Numbers written as text by the base itself, with adapters: as language models predict numbers without ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX, pad_rows
from cqwen_dist.data.tokenizer import DigitTokenizer
from cqwen_dist.model.backbone import cache_name, load_base
from cqwen_dist.model.lora import inject_lora, is_lora
from cqwen_dist.tables.adapted import BATCH, LORA, RATES, products_in
from cqwen_dist.tables.heads import READ, best

WHOLE, ROUNDED = 7, 4  # digits of a whole number and of another one, at most


class DigitText:
    """A base with adapters that learns to write a row's number after its prompt, all numerals as their digits."""

    def __init__(self, base: str, prompts: Sequence[str], y: np.ndarray, epochs: int, precision: str = "fp32") -> None:
        """base, precision: as `StartingBase`'s. y [n]: the number of each prompt. Raises `UserError`."""
        torch.manual_seed(0)  # the adapters
        self.epochs, self._precision = epochs, precision
        self.tokenizer = DigitTokenizer.from_pretrained(base)
        self.model = load_base(base, torch.float32).eval().requires_grad_(False)
        inject_lora(self.model.base_model, LORA)
        self.parameters = [p.requires_grad_() for name, p in self.model.named_parameters() if is_lora(name)]
        self._start = [parameter.detach().clone() for parameter in self.parameters]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self._device)
        end = self.tokenizer.eos_token_id
        self._end = self.tokenizer.encode("\n")[0][0] if end is None else end
        self._prompts = [self.tokenizer.encode(prompt)[0] for prompt in prompts]
        texts = [f"{value:.{WHOLE if float(value).is_integer() else ROUNDED}g}" for value in y]
        self._answers = [[*self.tokenizer.encode(text)[0], self._end] for text in texts]

    def learn(self, train: np.ndarray, valid: np.ndarray) -> None:
        """Train the adapters. train, valid: as `heads.learnt`."""

        def lost(_: None) -> float:
            return float(np.mean([float(self._loss(some)) for some in _split(valid)]))

        trained, _ = best(self._epochs, lost, RATES, train)
        trained(np.concatenate([train, valid]))

    def write(self, rows: np.ndarray, copies: int) -> np.ndarray:
        """Numbers [m,copies] of rows [m], sampled, or a single one greedily; NaN where the text is no number."""
        torch.manual_seed(0)
        with torch.no_grad(), products_in(self._precision, self._device):
            return np.concatenate([self._write(some, copies) for some in _split(rows, READ // 8)])

    def _epochs(self, rate: float, rows: np.ndarray) -> Iterator[None]:
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(self.parameters, lr=rate)
        for _ in range(self.epochs):
            for some in _split(rows[torch.randperm(len(rows)).numpy()], BATCH):
                optimizer.zero_grad()
                self._loss(some).backward()
                optimizer.step()
            yield

    def _loss(self, rows: np.ndarray) -> Tensor:
        """Mean cross-entropy of the answers' tokens and the end's."""
        prompts, answers = ([of[row] for row in rows] for of in (self._prompts, self._answers))
        batch = self._batch([p + a for p, a in zip(prompts, answers, strict=True)])
        labels = torch.full_like(batch["input_ids"], IGNORE_INDEX)
        for row, answer in enumerate(answers):
            labels[row, -len(answer) :] = batch["input_ids"][row, -len(answer) :]
        with products_in(self._precision, self._device):
            return self.model(**batch, labels=labels).loss

    def _write(self, rows: np.ndarray, copies: int) -> np.ndarray:
        """A prompt is read once. Its copies go on side by side in one cache: each sees the prompt and itself."""
        batch = self._batch([self._prompts[row] for row in rows])
        found = self.model(**batch, use_cache=True, logits_to_keep=1)
        cache = {cache_name(self.model): found[cache_name(self.model)]}
        logits = found.logits.expand(-1, copies, -1)  # [m,copies,V]
        seen = batch["attention_mask"].bool()[:, None].expand(-1, copies, -1)  # [m,copies,columns]
        own = torch.eye(copies, dtype=torch.bool, device=self._device).expand(len(rows), -1, -1)
        written: list[Tensor] = []
        for place in range(seen.shape[-1], seen.shape[-1] + max(map(len, self._answers))):
            if written:
                seen = torch.cat([seen, own], -1)
                places = torch.full_like(written[-1], place - 1)
                batch = {"input_ids": written[-1], "attention_mask": seen[:, None], "position_ids": places}
                logits = self.model(**batch, **cache).logits
            written.append(_drawn(logits.float().softmax(-1)) if copies > 1 else logits.argmax(-1))
        texts = torch.stack(written, -1).flatten(0, 1).tolist()
        return np.array([self._number(ids) for ids in texts]).reshape(len(rows), copies)

    def _number(self, ids: list[int]) -> float:
        try:
            value = float(self.tokenizer.decode(list(takewhile(lambda token: token != self._end, ids))))
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan

    def _batch(self, rows: list[list[int]]) -> dict[str, Tensor]:
        padded = pad_rows([(ids, [0.0] * len(ids)) for ids in rows], self.tokenizer.pad_token_id, on_left=True)
        return {"input_ids": padded.ids.to(self._device), "attention_mask": padded.mask.long().to(self._device)}


def _drawn(p: Tensor) -> Tensor:
    """A word for each copy [m,copies] by p [m,copies,V]: torch.multinomial draws V exponentials for each."""
    below = p.cumsum(-1)
    return torch.searchsorted(below, torch.rand_like(below[..., :1]) * below[..., -1:]).squeeze(-1)


def _split(rows: np.ndarray, size: int = READ) -> list[np.ndarray]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]
