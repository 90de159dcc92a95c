"""A tokenizer of words `w12` and numbers, apart by blanks: texts whose ids can be read off."""

from pathlib import Path

from support.tiny import NUM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Words:
    num_token_id = NUM
    eos_token_id: int | None = 5
    pad_token_id = 0
    digit_rows: tuple[int, ...] = ()

    def encode(self, text: str, begin: bool = True) -> tuple[list[int], list[float]]:
        words = text.split()
        ids = [int(w[1:]) if w.startswith("w") else NUM for w in words]
        return ids, [0.0 if w.startswith("w") else float(w) for w in words]

    def decode(self, ids: list[int], values: list[float] | None = None) -> str:
        numbers = ["<NUM>"] * len(ids) if values is None else [f" {v!r}" for v in values]
        return "".join(number if i == NUM else f" w{i}" for i, number in zip(ids, numbers, strict=True))

    def writing_as(self, text: str) -> "Words":
        return self


def save_words(folder: Path, size: int, **special: str) -> None:
    """So many words `w12` as a tokenizer of transformers'. Qwen2's adds the first one where it is missing."""
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w1", **special).save_pretrained(folder)
