"""Text to ids and values, and back. Numerals become <NUM>, the first reserved vocabulary row.

Text between numbers is tokenised piece by piece, spaces included: "costs 5 dollars" is "costs", " ", <NUM>, " dollars".
Qwen's pre-tokenizer splits around digits in the same way. <NUM> is the first row without a word. A Qwen2.5 vocabulary
has spare rows (V is 151,936 or 152,064, the tokenizer uses 151,665). If there is none (most Llamas), rows are added
(`model.base_loading.add_rows`). `cqwen_dist.batch` explains the shape letters.

A text begins as the base tokenizer begins it: with <s> in Llama and Mistral, with nothing in Qwen. It ends with one end
token. A chat begins as its template says. All readers of texts take `begin` and `eos_token_id` from this module.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cqwen_dist.batch import pad_rows
from cqwen_dist.config.bases import POLICY_FILE, line_end_ids, numeral_ids, rows_used, rows_with_number, symbols_of
from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.data.encoder import NumberEncoder, split
from cqwen_dist.data.write_numbers import Habits, habits_of, write_numbers

OWN_CLASS = "CausalQwenTokenizer"  # `data.auto_tokenizer` writes this into tokenizer_config.json
LONGEST_SIGNS = 8  # characters of a token, in which a sign like × has two
PLACEHOLDER = "<NUM>"  # written for a number without a value
# Qwen2's pre-tokenisation (transformers, models/qwen2/tokenization_qwen2.py).
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class Encoded(NamedTuple):
    """An encoded text: ids with a float64 value each, 0.0 at words."""

    ids: list[int]
    values: list[float]


class NumericalAwareTokenizer:
    """A Hugging Face tokenizer that reads numbers (seed S0 1.1, S2 2: a tool, no nn.Module).

    Args:
        tokenizer: a fast tokenizer; it is not modified.
        num_token_id: row of <NUM>; default: the first row after the tokenizer's (K = len(tokenizer)).
        vocab_size: V of the model, to check that <NUM> has a row or can get one (`rows_for`).
        policy: which numerals are numbers; default: `NumberPolicy()`.
    Raises: UserError if the vocabulary is too small, num_token_id is a word's row, or the tokenizer is slow.
    """

    reads_numbers = True

    def __init__(
        self,
        tokenizer: Any,
        num_token_id: int | None = None,
        vocab_size: int | None = None,
        policy: NumberPolicy | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            allowed = "a fast tokenizer; from_pretrained takes a folder or name"
            raise UserError("model.tokenizer", type(tokenizer).__name__, allowed)
        self.tokenizer = tokenizer
        self.policy = policy or NumberPolicy()
        self.habits = Habits()
        self._backend: Tokenizer = without_prefix(backend)
        self.text_size: int = rows_used(tokenizer)  # K: rows used by words
        self.num_token_id: int = self.text_size if num_token_id is None else num_token_id
        self.begin, end = _around(tokenizer)
        # End of a document: the token that the tokenizer writes after a text, else its eos_token; None without
        self.eos_token_id: int | None = end[-1] if end else tokenizer.eos_token_id
        # If <NUM> is a token in the tokenizer, the same letters in a text must not become it.
        self.literal: str | None = None
        if self.num_token_id < self.text_size:
            added = tokenizer.added_tokens_decoder
            if self.num_token_id not in added or self.num_token_id in (self.eos_token_id, self.pad_token_id):
                allowed = f"a reserved row, {self.text_size} or above, or an added token of its own"
                raise UserError("model.num_token_id", self.num_token_id, allowed)
            self.literal = str(added[self.num_token_id])
        if vocab_size is not None:
            self.rows_for(vocab_size)
        reading = self.policy if self.reads_numbers else None
        self.encoder = NumberEncoder(self._backend, self.num_token_id, reading, self.literal)

    def rows_for(self, vocab_size: int) -> int:
        """Vocabulary rows that the model needs: more than vocab_size if words use all rows. Raises `UserError`."""
        return rows_with_number(vocab_size, self.text_size, self.num_token_id)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        num_token_id: int | None = None,
        vocab_size: int | None = None,
        policy: NumberPolicy | None = None,
        key: str = "model.tokenizer",
    ) -> NumericalAwareTokenizer:
        """Load a tokenizer from a folder or the hub, with the settings written by `save_pretrained` as defaults.

        key: option name for errors. Raises: UserError if there is no tokenizer, and as the class.
        """
        name = str(name_or_path)
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise UserError(key, f"no folder {name}", "a folder or hub name with a tokenizer")
        folder = Path(name).expanduser()
        try:
            # AutoTokenizer would return CausalQwenTokenizer, which wraps the tokenizer needed here.
            path = folder / "tokenizer_config.json"
            kind = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") if path.is_file() else None
            loader = PreTrainedTokenizerFast if kind == OWN_CLASS else AutoTokenizer
            tokenizer = loader.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False)
        except Exception as error:  # the Rust side raises bare `Exception` for a broken tokenizer.json
            raise UserError(key, name, f"a folder or hub name with a tokenizer ({reason_of(error, 200)})") from None
        saved = folder / POLICY_FILE
        if saved.is_file():
            num_token_id, policy = read_policy(saved, tokenizer, num_token_id, policy)
        return cls(tokenizer, num_token_id, vocab_size, policy)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer's files and `number_policy.json` (num_token_id and the policy)."""
        self.tokenizer.save_pretrained(str(folder))
        self.write_policy(folder)

    def write_policy(self, folder: str | Path) -> Path:
        """Write only `number_policy.json`. token: the tokenizer's token in <NUM>'s row, or null."""
        path = Path(folder) / POLICY_FILE
        data = {"num_token_id": self.num_token_id, "token": self.literal, "policy": self.policy.model_dump()}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        return path

    def digest(self) -> str:
        """SHA-256 over everything that affects ids and values."""
        parts = (self._backend.to_str(), str(self.num_token_id), self.policy.model_dump_json())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def pad_token_id(self) -> int:
        """Padding token: the pad token, else the end token, else 0 (padding is masked, so any id works)."""
        known = (self.tokenizer.pad_token_id, self.eos_token_id, 0)
        return next(token_id for token_id in known if token_id is not None)

    @cached_property
    def numeral_ids(self) -> list[int]:
        """Tokens that numerals can consist of (`config.bases.numeral_ids`)."""
        return numeral_ids(self.tokenizer.get_vocab())

    @property
    def digit_rows(self) -> list[int]:
        """The tokens of a numeral's characters if digits are kept in view (`NumberPolicy.digits`), else none."""
        return self.encoder.digit_rows

    @cached_property
    def line_end_ids(self) -> list[int]:
        """Tokens with a line break (`config.bases.line_end_ids`)."""
        return line_end_ids(self.tokenizer.get_vocab())

    @cached_property
    def symbols(self) -> dict[str, list[int]]:
        """Tokens that are signs of arithmetic (`config.bases.symbols_of`)."""
        short = [token for word, token in self.tokenizer.get_vocab().items() if len(word) <= LONGEST_SIGNS]
        found = symbols_of(zip(self.tokenizer.batch_decode([[token] for token in short]), short, strict=True))
        silent = {*self.digit_rows} - {self.encoder.backend.token_to_id("-")}  # they belong to the number before them
        return {**found, "": sorted({*found.get("", []), *silent})} if silent else found

    def encode(self, text: str, begin: bool = True) -> Encoded:
        """Encode a text, with `begin` before it unless the text has it.

        begin: False for a text that continues a text, and for a chat.
        """
        return self.encode_batch([text], begin)[0]

    def encode_batch(self, texts: Sequence[str], begin: bool = True) -> list[Encoded]:
        """`encode` for many texts at once."""
        encoded = []
        first = list(self.begin) if begin else []
        for reading in self.encoder.read(texts):
            ids, numbers = reading.ids.tolist(), iter(reading.numbers)
            ids = ids if ids[: len(first)] == first else first + ids
            values = [next(numbers) if token == self.num_token_id else 0.0 for token in ids]
            encoded.append(Encoded(ids, values))
        return encoded

    def preprocess(self, texts: list[str], padding_side: Literal["right", "left"] = "right") -> dict[str, torch.Tensor]:
        """Texts to padded tensors (seed S2 2; S0 1.1). Pad on the left for generation from multiple texts.

        Returns: input_ids [B,T] int64; numeric_values [B,T] float64, 0 at words; attention_mask [B,T] int64, 0 at
        padding.
        """
        batch = pad_rows(self.encode_batch(texts), self.pad_token_id, on_left=padding_side == "left")
        return {"input_ids": batch.ids, "numeric_values": batch.values, "attention_mask": batch.mask.long()}

    def decode(
        self,
        ids: Sequence[int] | torch.Tensor,
        values: Sequence[float] | torch.Tensor | None = None,
        skip_special_tokens: bool = False,
    ) -> str:
        """Text for ids and values. Encoding the text again returns the same ids and values if they came from a text.

        Args: ids [T], values [T] (used only at <NUM>); None: numbers become `PLACEHOLDER`. A number is written in the
        shortest usual form that parses to the same float64 (`write_numbers`), so 1,234.50 becomes 1234.5; as the text
        has it after `writing_as(text)`. Raises: ValueError if the lengths differ.
        """
        known = [0.0] * len(ids) if values is None else values
        if len(ids) != len(known):
            raise ValueError(f"{len(ids)} ids, but {len(known)} values")
        pieces: list[str | float] = []
        plain: Any
        plain, numbers = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (ids, known))
        pairs = [(plain[i], numbers[i]) for i in self.encoder.places(plain)]
        for is_number, group in groupby(pairs, key=lambda pair: pair[0] == self.num_token_id):
            if is_number:
                pieces += [PLACEHOLDER if values is None else float(value) for _, value in group]
            else:
                words = [int(token_id) for token_id, _ in group]
                pieces.append(self._backend.decode(words, skip_special_tokens=skip_special_tokens))
        return write_numbers(pieces, self.policy, self.habits)

    def writing_as(self, text: str) -> NumericalAwareTokenizer:
        """This tokenizer, but it writes numbers as the text does: 1,024 if it groups digits, 24.00 if it has that."""
        other = copy.copy(self)
        other.habits = habits_of(text, self.policy)
        return other


class DigitTokenizer(NumericalAwareTokenizer):
    """The same tokenizer, but every numeral stays digits, as base models read it. Used for comparisons."""

    reads_numbers = False


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids before, ids after) a text, as the tokenizer's own post-processor writes them."""
    plain, whole = (tokenizer.backend_tokenizer.encode("a", add_special_tokens=own).ids for own in (False, True))
    if not plain:  # a vocabulary without the letter
        return (), ()
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def read_policy(
    path: str | Path, tokenizer: Any, given: int | None = None, policy: NumberPolicy | None = None
) -> tuple[int, NumberPolicy]:
    """<NUM>'s row and the policy: the given ones, or those of `number_policy.json`. Raises: UserError.

    tokenizer: it has to have the same token in the file's row as when the file was written. A token that was added
    since then would share the row with <NUM>.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        row, its, token = int(data["num_token_id"]), NumberPolicy(**data["policy"]), data["token"]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(POLICY_FILE, reason_of(error), "the file as save_pretrained wrote it", str(path)) from None
    now = None if given is not None else tokenizer.added_tokens_decoder.get(row)
    if now is not None and token != str(now):
        found = Said(f"row {row} for <NUM>, which is the token {now} now")
        allowed = f"the tokenizer without that token, or model.num_token_id: {1 + max(tokenizer.get_vocab().values())}"
        raise UserError("num_token_id", found, f"{allowed} (<NUM> then starts again there)", str(path))
    return row if given is None else given, policy or its


def without_prefix(backend: Tokenizer) -> Tokenizer:
    """The tokenizer, or a copy that neither adds nor strips a space at a text's start, as SentencePiece tokenizers do.

    Texts are encoded in pieces: each piece would get such a space.
    """
    before = [
        json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
    ]
    if [_no_prefix(part) for part in before] == before:
        return backend
    plan = json.loads(backend.to_str())
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        plan[name] = plan[name] and _no_prefix(plan[name])
    return Tokenizer.from_str(json.dumps(plan))


def _no_prefix(part: dict[str, Any]) -> dict[str, Any] | None:
    """A normalizer, pre-tokenizer or decoder (JSON) that leaves a text's start alone; None if nothing remains of it."""
    kind = part["type"]
    if kind == "Prepend" or (kind == "Strip" and part.get("content") == " " and part.get("start")):
        return None
    if kind == "Sequence":
        name = next(key for key in part if key != "type")
        left = [new for new in map(_no_prefix, part[name]) if new is not None]
        return {**part, name: left} if left else None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if kind == "ByteLevel" else part


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, policy: NumberPolicy | None = None
) -> PreTrainedTokenizerFast:
    """Train a small byte-level BPE like Qwen2's, offline and deterministic, on the text between numbers.

    Args: vocab_size: maximum words (at least 256 bytes and three special tokens); give the model one row more. Raises:
    UserError if vocab_size is below 259.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError("vocab_size", vocab_size, f"{smallest} or more (every byte and the special tokens)")
    policy = policy or NumberPolicy()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = chain.from_iterable(split(text, policy)[0] for text in texts)
    tokenizer.train_from_iterator(pieces, trainer)
    end = SPECIAL_TOKENS[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
    )
