"""The tokenizer with Hugging Face's interface: callable, found by AutoTokenizer, ready for the hub."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import BatchEncoding, PreTrainedTokenizerFast

from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.chat import CHATML, FIXED_DATE
from cqwen_dist.data.tokenizer import PLACEHOLDER, DigitTokenizer, NumericalAwareTokenizer, read_policy
from cqwen_dist.wings import from_wing

KEPT = ("chat_template", "clean_up_tokenization_spaces", "model_max_length", "name_or_path", "truncation_side")


class CausalQwenTokenizer(PreTrainedTokenizerFast):
    """Returned by `AutoTokenizer.from_pretrained` for an exported folder after `import cqwen_dist.auto`.

    A transformers tokenizer that also handles numbers: calls return numeric_values, padding keeps them, and decoding
    takes them. `encode` returns only ids, as in transformers. tokenizer.json does not contain <NUM>: without this
    package the same folder loads as the plain tokenizer, which reads numerals as words.

    Args: num_token_id, policy, vocab_size: see `NumericalAwareTokenizer`; read_numbers: False reads numerals as words,
    for libraries that pass on only ids; all other arguments: see transformers. Raises `UserError`.
    """

    vocab_files_names = {**PreTrainedTokenizerFast.vocab_files_names, "policy_file": POLICY_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask", "numeric_values"]  # noqa: RUF012
    padding_side = "left"  # generation appends on the right
    pad_token: Any

    def __init__(
        self,
        *args: Any,
        num_token_id: int | None = None,
        policy: NumberPolicy | None = None,
        vocab_size: int | None = None,
        policy_file: str | None = None,
        read_numbers: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(*args, **given)
        if policy_file is not None:
            num_token_id, policy = read_policy(policy_file, self, num_token_id, policy)
        self.pad_token = self.pad_token or self.eos_token  # padding is masked, so any token works
        kind = NumericalAwareTokenizer if read_numbers else DigitTokenizer
        self.reader = kind(self, num_token_id, vocab_size, policy)

    @classmethod
    def of(cls, tokenizer: NumericalAwareTokenizer) -> "CausalQwenTokenizer":
        """Convert to a transformers tokenizer."""
        return _like(cls, tokenizer.tokenizer, num_token_id=tokenizer.num_token_id, policy=tokenizer.policy)

    @classmethod
    def from_pretrained(cls, *args: Any, padding_side: str = "left", **given: Any) -> "CausalQwenTokenizer":
        """As in transformers. padding_side: ignores the side in the base's files, which is meant for training."""
        return super().from_pretrained(*args, padding_side=padding_side, **given)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **given: Any) -> dict[str, Any]:
        """Keep tokenizer.json unchanged; transformers would rebuild it from the vocabulary."""
        return given

    def save_pretrained(self, save_directory: Any, *args: Any, **given: Any) -> Any:
        """As transformers', with the code that the folder needs if this package is not installed."""
        if __name__.startswith("cqwen_dist."):  # if this class is a folder's copy, transformers copies its file
            self._auto_map = from_wing("code of a folder")(save_directory)
        return super().save_pretrained(save_directory, *args, **given)

    def _save_pretrained(self, save_directory: Any, file_names: tuple[str, ...], *args: Any, **given: Any) -> Any:
        written = super()._save_pretrained(save_directory, file_names, *args, **given)
        return (*written, str(self.reader.write_policy(save_directory)))

    # ---- the vocabulary ----

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A copy that reads numerals as words."""
        return _like(PreTrainedTokenizerFast, self)

    @property
    def num_token_id(self) -> int:
        """Row of <NUM>."""
        return self.reader.num_token_id

    @property
    def policy(self) -> NumberPolicy:
        """The policy that decides which numerals are numbers."""
        return self.reader.policy

    @property
    def _beyond(self) -> int | None:
        """Row of <NUM> if the wrapped tokenizer has no token there. None otherwise, and during construction."""
        reader = self.__dict__.get("reader")
        return None if reader is None or reader.num_token_id < reader.text_size else reader.num_token_id

    def __len__(self) -> int:
        """Number of rows, <NUM> included."""
        plain = super().__len__()
        return plain if self._beyond is None else max(self.reader.text_size, self._beyond + 1)

    def get_vocab(self) -> dict[str, int]:
        """Words and <NUM>."""
        own = {} if self._beyond is None else {PLACEHOLDER: self._beyond}
        return {**own, **super().get_vocab()}

    def _convert_token_to_id_with_added_voc(self, token: str) -> Any:
        if token == PLACEHOLDER and self._beyond is not None:
            return self._beyond
        return super()._convert_token_to_id_with_added_voc(token)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """As in transformers, with <NUM>."""
        if isinstance(ids, int):
            return PLACEHOLDER if ids == self._beyond else super().convert_ids_to_tokens(ids)
        left_out = self.all_special_ids if skip_special_tokens else []
        return [self.convert_ids_to_tokens(int(token)) for token in ids if int(token) not in left_out]

    def _add_tokens(self, new_tokens: list[Any], special_tokens: bool = False) -> int:
        """As in transformers, for existing tokens. Raises: UserError for a new token, which would get <NUM>'s row."""
        if "reader" in self.__dict__:
            new = next((str(token) for token in new_tokens if str(token) not in self.get_vocab()), None)
            if new is not None:
                allowed = "tokens that it has: the row after them is <NUM>'s"
                raise UserError("add_tokens", new, allowed)
        return int(super()._add_tokens(new_tokens, special_tokens))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Tokens that come before a text, or before two: models are trained so."""
        return len(self.reader.begin)

    # ---- reading ----

    def _encode_plus(self, text: Any, *args: Any, **given: Any) -> BatchEncoding:
        """Implements `__call__` and `encode`: transformers' fields plus numeric_values (float64, 0 at words).

        add_special_tokens: put `reader.begin` before a text, unless the text has it. Raises: UserError for
        options that read special tokens as words; ValueError as transformers does.
        """
        for odd in ("split_special_tokens", "sanitize_control_tokens"):
            if given.get(odd):
                raise UserError(odd, True, "False: special tokens of a text are special tokens")
        if isinstance(text, (list, tuple)) and not text and not given.get("is_split_into_words"):
            return BatchEncoding({"input_ids": [], "numeric_values": []}, [], tensor_type=given.get("return_tensors"))
        # transformers calls `_tokenizer` to truncate, pad and return overflowing windows. This copy has a backend that
        # reads numbers. Each call has its own copy, so concurrent calls do not meet.
        reading = copy.copy(self)
        reading._tokenizer = backend = _NumberBackend(self._tokenizer, self.reader)
        encoded = super(CausalQwenTokenizer, reading)._encode_plus(text, *args, **given)
        tokens = [zip(e.ids, e.tokens, strict=True) for e in encoded.encodings or []]
        numbers = [[backend.values[t] if i == self.num_token_id else 0.0 for i, t in row] for row in tokens]
        ids = encoded["input_ids"]
        encoded["numeric_values"] = _as(ids, numbers[0] if _is_one_row(ids) else numbers)
        return encoded

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False, **given: Any) -> list[str]:
        """Tokens of a text; a number becomes <NUM>."""
        return list(self.convert_ids_to_tokens(self.encode(text, pair, add_special_tokens, **given)))

    def preprocess(self, texts: list[str], padding_side: Any = "right") -> dict[str, torch.Tensor]:
        """See `NumericalAwareTokenizer.preprocess`."""
        return self.reader.preprocess(texts, padding_side)

    def pad(  # type: ignore[override]
        self, encoded_inputs: Any, padding: Any = True, *, padding_side: Any = None, **given: Any
    ) -> BatchEncoding:
        """Pad like transformers, and numeric_values with 0. Data collators call this."""
        if not isinstance(encoded_inputs, Mapping):
            encoded_inputs = {name: [row[name] for row in encoded_inputs] for name in encoded_inputs[0]}
        inputs = dict(encoded_inputs)
        values = inputs.pop("numeric_values", None)
        padded = super().pad(inputs, padding, padding_side=padding_side, **given)
        if values is not None:
            ids, values, rows = padded["input_ids"], _listed(values), []
            single = _is_one_row(ids)
            for row, wide in zip([values] if single else values, [ids] if single else ids, strict=True):
                own, zeros = [*map(float, row)], [0.0] * (len(wide) - len(row))
                rows.append(zeros + own if (padding_side or self.padding_side) == "left" else own + zeros)
            padded["numeric_values"] = _as(ids, rows[0] if single else rows)
        return padded if isinstance(padded, BatchEncoding) else BatchEncoding(padded)

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """As in transformers, with training's date and, without a template, its ChatML."""
        if chat_template is None and self.chat_template is None:
            return CHATML
        return FIXED_DATE + str(super().get_chat_template(chat_template, tools))

    # ---- writing ----

    def decode(  # type: ignore[override]
        self, token_ids: Any, values: Any = None, skip_special_tokens: bool = False, **ignored: Any
    ) -> Any:
        """See `NumericalAwareTokenizer.decode`. Without values, a number is written as <NUM>.

        Rows [B,T] return a list. ignored: clean_up_tokenization_spaces, which would change numbers.
        """
        if isinstance(values, bool):  # transformers' second positional argument is skip_special_tokens
            values, skip_special_tokens = None, values
        ids, values = _listed(token_ids), _listed(values)
        if isinstance(ids, int):
            ids, values = [ids], [values] if isinstance(values, (int, float)) else values
        if len(ids) and isinstance(ids[0], (list, tuple)):
            each = [None] * len(ids) if values is None else values
            return [self.decode(row, v, skip_special_tokens) for row, v in zip(ids, each, strict=True)]
        return self.reader.decode(ids, values, skip_special_tokens)

    def batch_decode(  # type: ignore[override]
        self, sequences: Any, values: Any = None, skip_special_tokens: bool = False, **ignored: Any
    ) -> list[str]:
        """`decode` for each row."""
        found = self.decode(sequences, values, skip_special_tokens)
        return [found] if isinstance(found, str) else found


def _like(kind: Any, source: Any, **own: Any) -> Any:
    """Build a different tokenizer class with the same words, special tokens and chat template."""
    kept = {name: getattr(source, name) for name in KEPT}
    special = {**source.special_tokens_map, "extra_special_tokens": source.extra_special_tokens}
    return kind(tokenizer_object=source.backend_tokenizer, **special, **kept, **own)


class _NumberBackend:
    """Replaces the Rust tokenizer during one call and reads numbers. transformers sets its truncation and padding.

    values: numeral -> value, filled while reading.
    """

    def __init__(self, words: Any, reader: NumericalAwareTokenizer) -> None:
        self.values: dict[str, float] = {}
        self._words, self._reader, self._settings = words, reader, Tokenizer(BPE())
        if reader.begin:
            names = [(str(words.id_to_token(row)), row) for row in reader.begin]
            start = " ".join(name for name, _ in names)
            self._settings.post_processor = TemplateProcessing(f"{start} $A", f"{start} $A $B:1", names)

    def __getattr__(self, name: str) -> Any:
        # Padding and truncation belong to this call: the shared Rust tokenizer must keep its settings.
        own = name.endswith(("padding", "truncation"))
        return getattr(self._settings if own else self._words, name)

    def encode_batch(self, rows: Any, add_special_tokens: bool, is_pretokenized: bool) -> list[Encoding]:
        """Encode rows: texts (with is_pretokenized: lists of words) or pairs. Raises as `_encode_plus`."""
        found = []
        for row in rows:
            is_pair = isinstance(row, (list, tuple)) and row and not (is_pretokenized and isinstance(row[0], str))
            parts: Any = [*map(self._read, row if is_pair else [row])]
            begun = tuple(parts[0].ids[: len(self._reader.begin)]) == self._reader.begin
            pair = parts[1] if is_pair else None
            found.append(self._settings.post_process(parts[0], pair, add_special_tokens and not begun))
        if (padding := self._settings.padding) is not None and padding["length"] is None:
            wide = max(map(len, found))
            token = {name: padding[name] for name in ("direction", "pad_id", "pad_type_id", "pad_token")}
            for encoding in found:
                encoding.pad(wide, **token)
        return found

    def _read(self, text: Any) -> Encoding:
        words = [text] if isinstance(text, str) else text
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"text input must be of type `str`, or lists of them, and not {type(text).__name__}")
        encoding, values = self._reader.encoder.encoding(words)
        self.values.update(values)
        return encoding


def _listed(given: Any) -> Any:
    """Tensors, arrays and lists of them as lists."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return [*map(_listed, given)] if isinstance(given, (list, tuple)) else given


def _is_one_row(ids: Any) -> bool:
    return len(ids) == 0 or not hasattr(ids[0], "__len__")


def _as(ids: Any, values: Any) -> Any:
    """Convert values to the ids' type: list, tensor or array, float64."""
    if isinstance(ids, torch.Tensor):
        return torch.tensor(values, dtype=torch.float64)
    return np.asarray(values) if isinstance(ids, np.ndarray) else values
