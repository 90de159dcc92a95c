"""Numbers written as text by the base itself, with adapters: as language models predict numbers without ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cqwen_dist.batch import IGNORE_INDEX, pad_rows
from cqwen_dist.data.tokenizer import DigitTokenizer
from cqwen_dist.model.backbone import cache_name, load_base
from cqwen_dist.model.lora import inject_lora, is_lora
from cqwen_dist.tables.benchmark.adapted_base import BATCH, LORA, RATES, products_in
from cqwen_dist.tables.benchmark.competitors import READ, best

WHOLE, ROUNDED = 7, 4  # digits of a whole number and of another one, at most
NO_NODE = 2**62  # after every node


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
        texts = self._texts(rows, copies)
        return np.array([[self._number(ids) for ids in of_row] for of_row in texts.tolist()])

    def _texts(self, rows: np.ndarray, copies: int) -> Tensor:
        """Ids [m,copies,words] of what rows [m] are answered, the end's and what follows it too.

        A prompt is read once, and so is what several copies of it have begun with, a node. Nodes stand side by side in
        one cache, and each sees its prompt and the nodes before it.
        """
        batch = self._batch([self._prompts[row] for row in rows])
        found = self.model(**batch, use_cache=True, logits_to_keep=1)
        cache = {cache_name(self.model): found[cache_name(self.model)]}
        logits, seen = found.logits, batch["attention_mask"].bool()[:, None]  # [m,nodes,V], [m,nodes,columns]
        at = nodes = torch.zeros(len(rows), copies, dtype=torch.int64, device=self._device)  # at: each copy's node
        words: list[Tensor] = []
        vocabulary = logits.shape[-1]
        for place in range(seen.shape[-1], seen.shape[-1] + max(map(len, self._answers))):
            if words:
                own = torch.eye(nodes.shape[1], dtype=torch.bool, device=self._device).expand(len(rows), -1, -1)
                parents = (nodes // vocabulary)[..., None].expand(-1, -1, seen.shape[-1])
                seen = torch.cat([seen.gather(1, parents), own], -1)
                ids, places = nodes % vocabulary, torch.full_like(nodes, place - 1)
                logits = self.model(input_ids=ids, attention_mask=seen[:, None], position_ids=places, **cache).logits
            drawn = _drawn(logits.float().softmax(-1), at) if copies > 1 else logits.argmax(-1)
            words.append(drawn if not words else drawn.where(words[-1] != self._end, self._end))
            went_on = (at * vocabulary + words[-1]).where(words[-1] != self._end, self._end)  # all that ended: one node
            nodes = pad_sequence([torch.unique(of_row) for of_row in went_on], batch_first=True, padding_value=NO_NODE)
            at, nodes = torch.searchsorted(nodes, went_on), nodes.where(nodes != NO_NODE, self._end)
        return torch.stack(words, -1)

    def _number(self, ids: list[int]) -> float:
        try:
            value = float(self.tokenizer.decode(list(takewhile(lambda token: token != self._end, ids))))
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan

    def _batch(self, rows: list[list[int]]) -> dict[str, Tensor]:
        padded = pad_rows([(ids, [0.0] * len(ids)) for ids in rows], self.tokenizer.pad_token_id, on_left=True)
        return {"input_ids": padded.ids.to(self._device), "attention_mask": padded.mask.long().to(self._device)}


def _drawn(p: Tensor, at: Tensor) -> Tensor:
    """A word for each copy [m,copies] by p [m,nodes,V] at its node: torch.multinomial draws V exponentials for each."""
    below = p.cumsum(-1)
    total = below[..., -1].gather(1, at)
    of_nodes = torch.searchsorted(
        below, (torch.rand_like(total) * total)[:, None].expand(-1, p.shape[1], -1).contiguous()
    )
    return of_nodes.gather(1, at[:, None]).squeeze(1)


def _split(rows: np.ndarray, size: int = READ) -> list[np.ndarray]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]
