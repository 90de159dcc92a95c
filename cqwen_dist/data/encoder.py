"""Texts to ids and numbers in bulk, without torch or transformers: what the worker processes of `prepare` run.

The text between numbers is encoded piece by piece. For many texts at once each number is replaced by a marker that is
an added token of a copy of the tokenizer: added tokens cut a text before anything else looks at it, so the pieces come
out as if encoded alone, in one call instead of one a piece (1.7 times as fast).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from array import array
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.normalizers import NFC

from cqwen_dist.config import NumberPolicy
from cqwen_dist.data.ascii_words import AsciiWords
from cqwen_dist.data.numbers import find_numbers

# A noncharacter: no text that is meant for exchange holds it, and one that does takes the slow way.
_MARK = "\U0010fffe"
_FIELDS = ("ids", "tokens", "words", "offsets")
_LITTLE = 1 << 14  # characters for which getting ready (a second, with a real vocabulary) is not worth it
_NUMERAL = re.compile(r"\d(?:[\w.,:/-]*\d)?")


class Reading(NamedTuple):
    """One text: its ids; its numbers, one for each <NUM> among them; literals too large for float64, which stayed
    text; and how many numerals stayed text."""

    ids: array[int]  # of int32
    numbers: list[float]
    overflows: list[str]
    left: int


class NumberEncoder:
    """A fast tokenizer and a policy.

    Args: backend: the Rust tokenizer, or its JSON; num_token_id: the id of <NUM>; policy: which numerals are numbers,
    None: none at all; literal: the text of <NUM> where it is a token of the tokenizer's own (the same letters in a text
    must not become it).
    """

    def __init__(
        self, backend: Tokenizer | str, num_token_id: int, policy: NumberPolicy | None, literal: str | None = None
    ) -> None:
        self._backend = Tokenizer.from_str(backend) if isinstance(backend, str) else backend
        self.num_token_id, self.policy, self.literal = num_token_id, policy, literal
        self._marked: tuple[Tokenizer, int] | None = None
        self._ascii: AsciiWords | Literal[False] | None = None  # False: not this tokenizer
        self._fingerprint = ""

    def __reduce__(self) -> tuple[type[NumberEncoder], tuple[str, int, NumberPolicy | None, str | None]]:
        return type(self), (self.to_json(), self.num_token_id, self.policy, self.literal)  # into a worker process

    def to_json(self) -> str:
        """The Rust tokenizer as text."""
        return str(self._backend.to_str())

    def fingerprint(self) -> str:
        """SHA-256 of what decides ids: of the tokenizer's parts, however the file that it came from spells nothing."""
        if not self._fingerprint:
            plan = json.loads(self.to_json())
            parts = {name: plan[name] for name in ("normalizer", "pre_tokenizer", "added_tokens")}
            parts["model"] = {name: value for name, value in plan["model"].items() if value}
            self._fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return self._fingerprint

    def read(self, texts: Sequence[str]) -> list[Reading]:
        """Every text by itself; no token is added."""
        pieces, numbers, overflows = [], [], []
        for text in texts:
            found = self.split(text)
            pieces.append(found[0])
            numbers.append(found[1])
            overflows.append(found[2])
        left = [len(_NUMERAL.findall(_MARK.join(own))) for own in pieces]
        ids = self._many(texts, pieces) if sum(map(len, texts)) > _LITTLE else [self._one(own) for own in pieces]
        return [Reading(*row) for row in zip(ids, numbers, overflows, left, strict=True)]

    def encoding(self, texts: Sequence[str]) -> tuple[Encoding, dict[str, float], list[str]]:
        """A text, or its words, as tokenizers' own Encoding, with the same ids as `read` gives.

        A number's token is its numeral. With the value of each numeral, and literals that overflow. Offsets count
        characters of the text in NFC, or of each word.
        """
        values: dict[str, float] = {}
        overflows: list[str] = []
        rows: list[tuple[int, str, int, tuple[int, int]]] = []  # id, token, word, offsets
        for i, text in enumerate(texts):
            pieces, numbers, odd, numerals = self._split(text)
            values.update(zip(numerals, numbers, strict=True))
            overflows += odd
            parts, spelt, at, words = self._parts(pieces), iter(numerals), 0, 0
            encoded = iter(self._backend.encode_batch([p for p in parts if p is not None], add_special_tokens=False))
            for part in parts:
                if part is None:
                    part = next(spelt)
                    own = [(self.num_token_id, part, 0, (0, len(part)))]
                else:
                    e = next(encoded)
                    own = list(zip(e.ids, e.tokens, (w or 0 for w in e.word_ids), e.offsets, strict=True))
                rows += [(n, t, words + w if len(texts) == 1 else i, (at + a, at + b)) for n, t, w, (a, b) in own]
                at, words = at + len(part), words + 1 + max((w for _, _, w, _ in own), default=-1)
        found = Encoding()
        names: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(_FIELDS)}
        same = {"type_ids": [0] * len(rows), "special_tokens_mask": [0] * len(rows), "attention_mask": [1] * len(rows)}
        state = {**names, **same, "overflowing": [], "sequence_ranges": {}}
        found.__setstate__(json.dumps(state).encode())  # as it is pickled: what can be merged loses its words' numbers
        return found, values, overflows

    def split(self, text: str) -> tuple[list[str], list[float], list[str]]:
        """The n + 1 texts around n numbers (some may be empty), the numbers, and the literals that overflow."""
        return self._split(text)[:3]

    def _split(self, text: str) -> tuple[list[str], list[float], list[str], list[str]]:
        """And how the numbers are spelt."""
        if not text.isascii():
            # As Qwen's tokenizer does, but before numbers are looked for: a composed letter binds as its parts do.
            text = unicodedata.normalize("NFC", text)
        pieces: list[str] = []
        numbers: list[float] = []
        overflows: list[str] = []
        numerals: list[str] = []
        position = 0
        for start, end, value in find_numbers(text, self.policy) if self.policy is not None else ():
            if math.isinf(value):
                overflows.append(text[start:end])
                continue
            pieces.append(text[position:start])
            numbers.append(value)
            numerals.append(text[start:end])
            position = end
        pieces.append(text[position:])
        return pieces, numbers, overflows, numerals

    def _many(self, texts: Sequence[str], pieces: list[list[str]]) -> list[array[int]]:
        if self._ascii is None:
            plan = json.loads(self.to_json())
            self._ascii = AsciiWords(self._backend, plan) if AsciiWords.suits(plan) else False
        if self._ascii is False:
            return self._in_bulk(pieces)
        quick = [self._ascii.takes(text) for text in texts]
        plain = [own for own, is_quick in zip(pieces, quick, strict=True) if is_quick]
        other = [own for own, is_quick in zip(pieces, quick, strict=True) if not is_quick]
        ways = {True: iter(self._ascii.encode(plain, self.num_token_id)), False: iter(self._in_bulk(other))}
        return [next(ways[is_quick]) for is_quick in quick]

    def _in_bulk(self, texts: list[list[str]]) -> list[array[int]]:
        if not texts:
            return []
        if self._marked is None:
            copy = Tokenizer.from_str(self.to_json())
            if type(copy.normalizer) is NFC:  # as all texts are by now, and so are their parts
                copy.normalizer = None
            copy.add_special_tokens([AddedToken(_MARK, special=True, normalized=False)])
            self._marked = copy, copy.get_vocab(with_added_tokens=True)[_MARK]
        tokenizer, mark = self._marked
        joined = [_MARK.join(pieces) for pieces in texts]
        found = [array("i", e.ids) for e in tokenizer.encode_batch_fast(joined, add_special_tokens=False)]
        if mark != self.num_token_id:
            found = [array("i", [self.num_token_id if token == mark else token for token in ids]) for ids in found]
        for i, (text, pieces) in enumerate(zip(joined, texts, strict=True)):
            if (self.literal is not None and self.literal in text) or text.count(_MARK) != len(pieces) - 1:
                found[i] = self._one(pieces)
        return found

    def _one(self, pieces: list[str]) -> array[int]:
        """The same, one piece after the other."""
        parts = self._parts(pieces)
        words = self._backend.encode_batch_fast([p for p in parts if p is not None], add_special_tokens=False)
        encoded = iter(words)
        ids = array("i")
        for part in parts:
            ids.extend([self.num_token_id] if part is None else next(encoded).ids)
        return ids

    def _parts(self, pieces: list[str]) -> list[str | None]:
        """What is encoded by itself; None: a number."""
        parts: list[str | None] = []
        for i, piece in enumerate(pieces):
            parts += [None] * (i > 0)
            if self.literal is not None and self.literal in piece:
                cut = f"{self.literal[0]}\0{self.literal[1:]}"
                parts += piece.replace(self.literal, cut).split("\0")
            elif piece:
                parts.append(piece)
        return parts
