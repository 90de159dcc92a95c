"""Qwen's tokenizer on plain ASCII, several times faster: Python's `re` splits words and a dict caches their ids.

Texts repeat words, and the Rust tokenizer splits and merges every occurrence again. On ASCII, `re` splits exactly like
Qwen2's pattern: letters and digits are ranges, and white space is the same six characters. The tokenizer merges each
distinct word once; after that a lookup is enough. Other tokenizers, and texts with non-ASCII characters or special
tokens, take the normal path.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

# Qwen2's pre-tokenisation (transformers, models/qwen2/tokenization_qwen2.py).
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same pattern for ASCII. "\0" stands for a number: it is a separate word and acts like the end of the text.
_ASCII = re.compile(
    r" ?[A-Za-z]+|'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])|[^\r\nA-Za-z0-9\0]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9\0]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?![^\s\0])|\s+|\0",
    re.ASCII,
)
_WORDS = 200_000  # cached words, so memory stays bounded


class _Ids(dict[str, bytes]):
    """Word -> ids as int32 bytes. A missing word is tokenised once and cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> bytes:
        found = self[word] = array("i", self._tokenizer.encode(word, add_special_tokens=False).ids).tobytes()
        return found


class AsciiWords:
    """Args: backend: a tokenizer for which `suits` is true; plan: its JSON."""

    def __init__(self, backend: Tokenizer, plan: dict[str, Any]) -> None:
        tokens = [token["content"] for token in plan["added_tokens"]]
        self._special = re.compile("|".join(map(re.escape, ["\0", *tokens])))
        merging = Tokenizer(backend.model)
        merging.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        self._ids = _Ids(merging)

    @staticmethod
    def suits(plan: dict[str, Any]) -> bool:
        """Whether the tokenizer splits like Qwen2's, and merges without dropout or unknown words."""
        steps = (plan["pre_tokenizer"] or {}).get("pretokenizers") or [{}, {}]
        split = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        plain = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        return (
            len(steps) == 2
            and steps[0] == split
            and level.items() <= steps[1].items()
            and plan["normalizer"] in (None, {"type": "NFC"})  # NFC leaves ASCII unchanged
            and plan["model"]["type"] == "BPE"
            and not any(plan["model"].get(name) for name in plain)
            and not any(token[side] for token in plan["added_tokens"] for side in ("lstrip", "rstrip", "single_word"))
        )

    def takes(self, text: str) -> bool:
        """Whether this text can use the fast path."""
        return text.isascii() and self._special.search(text) is None

    def encode(self, texts: list[list[str]], number: int) -> list[array[int]]:
        """Ids of texts. Each text is a list of pieces, with a number (id `number`) between two pieces."""
        ids = self._ids
        if len(ids) > _WORDS:
            ids.clear()
        ids["\0"] = array("i", [number]).tobytes()
        return [array("i", b"".join(map(ids.__getitem__, _ASCII.findall("\0".join(own))))) for own in texts]
