"""Texts to ids and numbers, in bulk. Runs in the workers of `prepare`, so it imports neither torch nor transformers.

The text between numbers is encoded piece by piece. In bulk, a marker (an added token in a copy of the tokenizer)
replaces each number. Added tokens split a text before every other step, so one call per text returns the same ids as
one call per piece, 1.7 times as fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.normalizers import NFC

from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.shape import CHARACTERS
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.write_numbers import in_decimals

# A noncharacter. Texts that contain it anyway are encoded piece by piece.
_MARK = "\U0010fffe"
_FIELDS = ("ids", "tokens", "words", "offsets")
_LITTLE = 1 << 14  # below this many characters, copying the tokenizer (about a second) does not pay
SURROGATE = re.compile("[\ud800-\udfff]")
_NUMERAL = re.compile(r"\d(?:[\w.,:/-]*\d)?")


class Reading(NamedTuple):
    """One encoded text."""

    ids: array[int]  # int32
    numbers: list[float]  # one per <NUM> in ids
    overflows: list[str]  # literals that float64 does not hold; they stay text
    left: int  # numerals that stay text
    given: list[int]  # tokens behind each <NUM> that are its numeral's


@dataclass(eq=False)
class NumberEncoder:
    """A fast tokenizer with a number policy.

    Args: backend: the Rust tokenizer; num_token_id: id of <NUM>; policy: which numerals are numbers, None
    for none; literal: text of <NUM> if the tokenizer has it as a token (the same letters in a text must not become
    <NUM>).
    """

    backend: Tokenizer
    num_token_id: int
    policy: NumberPolicy | None
    literal: str | None = None

    @cached_property
    def _marked(self) -> tuple[Tokenizer, int]:
        """A copy of the tokenizer with the marker, and the marker's id."""
        tokenizer = Tokenizer.from_str(self.backend.to_str())
        if type(tokenizer.normalizer) is NFC:  # `split` has already normalised the text
            tokenizer.normalizer = None
        tokenizer.add_special_tokens([AddedToken(_MARK, special=True, normalized=False)])
        return tokenizer, tokenizer.get_vocab(with_added_tokens=True)[_MARK]

    @cached_property
    def digit_rows(self) -> list[int]:
        """The tokens of `CHARACTERS`, in this order, if digits are kept in view; else none. Raises `UserError`."""
        if self.policy is None or not self.policy.digits:
            return []
        found = {character: self.backend.token_to_id(character) for character in CHARACTERS}
        missing = [character for character, row in found.items() if row is None]
        if missing:
            raise UserError("data.keep_digits", True, f"false: the tokenizer has no token {missing[0]}")
        return [row for row in found.values() if row is not None]

    def rest_of(self, value: float) -> list[tuple[int, str]]:
        """The tokens behind <NUM> with their characters: the numeral without its first."""
        rest = in_decimals(value)[1:] if self.digit_rows else ""
        return [(self.digit_rows[CHARACTERS.index(character)], character) for character in rest]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the settings that affect ids. In the tokenizer's model, null equals false and a missing key."""
        plan = json.loads(self.backend.to_str())
        parts = {name: plan[name] for name in ("normalizer", "pre_tokenizer", "added_tokens")}
        parts["model"] = {name: value for name, value in plan["model"].items() if value}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def read(self, texts: Sequence[str]) -> list[Reading]:
        """Encode each text separately, without special tokens."""
        found = [split(text, self.policy) for text in texts]
        pieces = [own for own, *_ in found]
        ids = self._in_bulk(pieces) if sum(map(len, texts)) > _LITTLE else [self._one(own) for own in pieces]
        readings = []
        for own_ids, (own, numbers, overflows, _) in zip(ids, found, strict=True):
            left, rests = len(_NUMERAL.findall(_MARK.join(own))), [self.rest_of(number) for number in numbers]
            whole = self._with_digits(own_ids, rests) if self.digit_rows else own_ids
            readings.append(Reading(whole, numbers, overflows, left, [len(rest) for rest in rests]))
        return readings

    def _with_digits(self, ids: array[int], rests: list[list[tuple[int, str]]]) -> array[int]:
        """ids with the rest of each numeral behind its <NUM>."""
        found, following = array("i"), iter(rests)
        for token in ids:
            found.append(token)
            if token == self.num_token_id:
                found.extend(row for row, _ in next(following))
        return found

    def places(self, ids: Sequence[int]) -> list[int]:
        """Indices of ids [T] without the digits behind each <NUM>: [0-9]*, and a point with digits."""
        if not self.digit_rows:
            return list(range(len(ids)))
        digits, point = {*self.digit_rows[:10]}, self.digit_rows[CHARACTERS.index(".")]

        def run(start: int) -> int:
            return next((i for i in range(start, len(ids)) if ids[i] not in digits), len(ids))

        found, at = [], 0
        while at < len(ids):
            found.append(at)
            at += 1
            if ids[at - 1] == self.num_token_id:
                at = run(at)
                if at < len(ids) and ids[at] == point and run(at + 1) > at + 1:
                    at = run(at + 1)
        return found

    def encoding(self, texts: Sequence[str]) -> tuple[Encoding, dict[str, float]]:
        """Encode a text, or its words, as tokenizers' Encoding, with the ids that `read` returns.

        A number's token is its numeral. Also returns a dict from numeral to value.
        Offsets count characters in the NFC text, or in each word.
        """
        values: dict[str, float] = {}
        rows: list[tuple[int, str, int, tuple[int, int]]] = []  # id, token, word, offsets
        for i, text in enumerate(texts):
            pieces, numbers, _, numerals = split(text, self.policy)
            values.update(zip(numerals, numbers, strict=True))
            parts, spelt, at, words = self._parts(pieces), iter(numerals), 0, 0
            encoded = iter(self.backend.encode_batch([p for p in parts if p is not None], add_special_tokens=False))
            for part in parts:
                if part is None:
                    part = next(spelt)
                    own = [(self.num_token_id, part, 0, (0, len(part)))]
                    own += [
                        (row, character, 0, (len(part), len(part))) for row, character in self.rest_of(values[part])
                    ]
                else:
                    e = next(encoded)
                    own = list(zip(e.ids, e.tokens, (w or 0 for w in e.word_ids), e.offsets, strict=True))
                rows += [(n, t, words + w if len(texts) == 1 else i, (at + a, at + b)) for n, t, w, (a, b) in own]
                at, words = at + len(part), words + 1 + max((w for _, _, w, _ in own), default=-1)
        found = Encoding()
        names: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(_FIELDS)}
        same = {"type_ids": [0] * len(rows), "special_tokens_mask": [0] * len(rows), "attention_mask": [1] * len(rows)}
        state = {**names, **same, "overflowing": [], "sequence_ranges": {}}
        found.__setstate__(json.dumps(state).encode())  # unpickling keeps word ids; Encoding.merge loses them
        return found, values

    def _in_bulk(self, texts: list[list[str]]) -> list[array[int]]:
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
        parts = self._parts(pieces)
        words = [part for part in parts if part is not None]
        encoded = iter(self.backend.encode_batch_fast(words, add_special_tokens=False))
        ids = array("i")
        for part in parts:
            ids.extend([self.num_token_id] if part is None else next(encoded).ids)
        return ids

    def _parts(self, pieces: list[str]) -> list[str | None]:
        """Parts to encode one by one; None stands for a number."""
        parts: list[str | None] = []
        for i, piece in enumerate(pieces):
            parts += [None] * (i > 0)
            if self.literal is not None and self.literal in piece:
                # Split inside the literal: neither half is an added token, so the letters are encoded as words.
                cut = f"{self.literal[0]}\0{self.literal[1:]}"
                parts += piece.replace(self.literal, cut).split("\0")
            elif piece:
                parts.append(piece)
        return parts


def split(text: str, policy: NumberPolicy | None) -> tuple[list[str], list[float], list[str], list[str]]:
    """Returns the n + 1 pieces around n numbers (pieces may be empty), the numbers, literals that float64 does not
    hold, and numerals.

    Raises `UserError` for a lone surrogate, which Python creates from command-line bytes that are not UTF-8.
    """
    if not text.isascii():
        if (odd := SURROGATE.search(text)) is not None:
            raise UserError("text", odd[0], "Unicode text, such as UTF-8 holds: no lone surrogates")
        # Qwen's tokenizer normalises too, but later. A composed letter must bind to a numeral like its parts do.
        text = unicodedata.normalize("NFC", text)
    pieces: list[str] = []
    numbers: list[float] = []
    overflows: list[str] = []
    numerals: list[str] = []
    position = 0
    for start, end, value in find_numbers(text, policy) if policy is not None else ():
        if math.isinf(value):
            overflows.append(text[start:end])
            continue
        pieces.append(text[position:start])
        numbers.append(value)
        numerals.append(text[start:end])
        position = end
    pieces.append(text[position:])
    return pieces, numbers, overflows, numerals
