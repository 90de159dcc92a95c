"""A competitor that writes numbers as text: the base model with adapters, without our number head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.numbers.adapted_base import BATCH, LORA, RATE, products_in
from benchmarks.numbers.competitors import READ, train_once
from cqwen_dist.batch import IGNORE_INDEX, pad_rows
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.data.tokenizer import DigitTokenizer
from cqwen_dist.model.backbone import cache_name
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.model.lora import inject_lora
from cqwen_dist.ops.products import dtype_of

WHOLE, ROUNDED = 7, 4  # maximum significant digits in integers and in other numbers
NO_NODE = 2**62  # padding, which must sort after every node


class DigitText:
    """A base with adapters that learns to write a row's number after its prompt, with all numerals as digit tokens."""

    def __init__(self, base: str, prompts: Sequence[str], y: np.ndarray, epochs: int, precision: str = "fp32") -> None:
        """base, precision: as in `StartingBase`. y [n]: the number for each prompt. Raises `UserError`."""
        torch.manual_seed(0)  # for the adapters
        self.epochs, self._precision = epochs, precision
        self.tokenizer = DigitTokenizer.from_pretrained(base)
        self.model = load_base(base, dtype_of(precision)).eval().requires_grad_(False)
        inject_lora(self.model.base_model, LORA)
        self.parameters = [p.requires_grad_() for name, p in self.model.named_parameters() if is_lora(name)]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self._device)
        end = self.tokenizer.eos_token_id
        self._end = self.tokenizer.encode("\n")[0][0] if end is None else end
        self._prompts = [self.tokenizer.encode(prompt)[0] for prompt in prompts]
        texts = [f"{value:.{WHOLE if float(value).is_integer() else ROUNDED}g}" for value in y]
        self._answers = [[*self.tokenizer.encode(text, begin=False)[0], self._end] for text in texts]

    def learn(self, rows: np.ndarray) -> None:
        """Train the adapters on some rows."""
        train_once(self.parameters, lambda some: self._loss(some.numpy()), rows, self.epochs, RATE, BATCH)

    def write(self, rows: np.ndarray, copies: int) -> np.ndarray:
        """Numbers [m,copies] for rows [m], sampled, or greedy if copies is 1; NaN if a text is not a number."""
        torch.manual_seed(0)
        with torch.no_grad(), products_in(self._precision, self._device):
            return np.concatenate([self._write(some, copies) for some in _split(rows, READ // 8)])

    def _loss(self, rows: np.ndarray) -> Tensor:
        """Mean cross-entropy over the answer tokens, including the end token."""
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
        """Token ids [m,copies,words] of the answers for rows [m], including end tokens.

        The model processes each prompt once, and each prefix that copies share once. A shared prefix is a node.
        All nodes of a row share a cache, and the mask lets a node see the prompt and all ancestors.
        """
        batch = self._batch([self._prompts[row] for row in rows])
        found = self.model(**batch, use_cache=True, logits_to_keep=1)
        cache = {cache_name(self.model): found[cache_name(self.model)]}
        logits, seen = found.logits, batch["attention_mask"].bool()[:, None]  # [m,nodes,V], [m,nodes,columns]
        at = nodes = torch.zeros(len(rows), copies, dtype=torch.int64, device=self._device)  # at: the node of each copy
        words: list[Tensor] = []
        vocabulary = logits.shape[-1]
        for place in range(seen.shape[-1], seen.shape[-1] + max(map(len, self._answers))):
            if words:
                # Give every node a new cache column. It sees itself and the columns that its parent sees.
                own = torch.eye(nodes.shape[1], dtype=torch.bool, device=self._device).expand(len(rows), -1, -1)
                parents = (nodes // vocabulary)[..., None].expand(-1, -1, seen.shape[-1])
                seen = torch.cat([seen.gather(1, parents), own], -1)
                ids, places = nodes % vocabulary, torch.full_like(nodes, place - 1)
                logits = self.model(input_ids=ids, attention_mask=seen[:, None], position_ids=places, **cache).logits
            drawn = _drawn(logits.float().softmax(-1), at) if copies > 1 else logits.argmax(-1)
            words.append(drawn if not words else drawn.where(words[-1] != self._end, self._end))
            # A node id combines the parent and the last word; all finished copies share one node.
            went_on = (at * vocabulary + words[-1]).where(words[-1] != self._end, self._end)
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
    """Draws a word for each copy [m,copies] from p [m,nodes,V] at the copy's node.

    It inverts the cumulative distribution, as torch.multinomial would draw V exponentials per copy.
    """
    below = p.cumsum(-1)
    total = below[..., -1].gather(1, at)
    of_nodes = torch.searchsorted(
        below, (torch.rand_like(total) * total)[:, None].expand(-1, p.shape[1], -1).contiguous()
    )
    return of_nodes.gather(1, at[:, None]).squeeze(1)


def _split(rows: np.ndarray, size: int = READ) -> list[np.ndarray]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]
