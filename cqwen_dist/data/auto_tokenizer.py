"""The tokenizer as Hugging Face users know tokenizers: called on texts, found by AutoTokenizer, pushed to the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import BatchEncoding
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import PushToHubMixin

from cqwen_dist.config import NumberPolicy, UserError
from cqwen_dist.data.chat import CHATML
from cqwen_dist.data.tokenizer import OWN_CLASS, NumericalAwareTokenizer

FILES = ["tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.jinja", "number_policy.json"]
PLACEHOLDER = "<NUM>"  # what a number whose value is not known is written as


class CausalQwenTokenizer(NumericalAwareTokenizer, PushToHubMixin):
    """What `AutoTokenizer.from_pretrained` gives for an exported folder once `cqwen_dist.auto` has been imported.

    It reads and writes numbers; all else that transformers' tokenizers have (eos_token, is_fast, vocab_size,
    convert_tokens_to_ids, ...) is the wrapped tokenizer's own, to get and to set. It is no PreTrainedTokenizerBase.
    Without this package the same folder gives the plain tokenizer, which reads numerals as words.
    """

    model_input_names = ("input_ids", "attention_mask", "numeric_values")
    padding_side: Literal["left", "right"] = "left"  # as generating needs it
    _auto_class: str | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoTokenizer") -> None:
        """transformers calls this where the class is of a folder's own code, which `save_pretrained` then copies."""
        cls._auto_class = auto_class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tokenizer":  # while it is copied there is none yet
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        made = "encoder" in self.__dict__  # what __init__ sets last
        ours = name in self.__dict__ or (hasattr(type(self), name) and name not in ("eos_token_id", "pad_token_id"))
        if made and not ours and hasattr(self.tokenizer, name):
            setattr(self.tokenizer, name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        """Rows of words, and of <NUM>."""
        return max(self.text_size, self.num_token_id + 1)

    @classmethod
    def of(cls, tokenizer: NumericalAwareTokenizer) -> CausalQwenTokenizer:
        """The same tokenizer with this face."""
        return cls(tokenizer.tokenizer, tokenizer.num_token_id, policy=tokenizer.policy)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        num_token_id: int | None = None,
        vocab_size: int | None = None,
        policy: NumberPolicy | None = None,
        **hub: Any,
    ) -> CausalQwenTokenizer:
        """As `NumericalAwareTokenizer.from_pretrained`; hub: revision, token, cache_dir, local_files_only, and
        padding_side."""
        folder = Path(name_or_path).expanduser()
        if not folder.is_dir() and not str(name_or_path).startswith((".", "/", "~")):
            from huggingface_hub import snapshot_download

            known = ("revision", "token", "cache_dir", "local_files_only")
            wanted = {key: value for key, value in hub.items() if key in known and value is not None}
            folder = Path(snapshot_download(str(name_or_path), allow_patterns=FILES, **wanted))
        found = cls.of(NumericalAwareTokenizer.from_pretrained(folder, num_token_id, vocab_size, policy))
        found.padding_side = hub.get("padding_side") or cls.padding_side
        return found

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """The tokenizer's own files, `number_policy.json`, and this class's name for AutoTokenizer."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        super().save_pretrained(folder)
        path = Path(folder) / "tokenizer_config.json"
        config = {**json.loads(path.read_text(encoding="utf-8")), "tokenizer_class": OWN_CLASS}
        if self._auto_class is not None:
            custom_object_save(self, folder, config)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        add_special_tokens: bool = False,
        padding_side: Literal["left", "right"] | None = None,
        **pad: Any,
    ) -> BatchEncoding:
        """input_ids, attention_mask, numeric_values (float64, 0 at words) of a text or of several, as transformers'
        tokenizers give them: lists, or with return_tensors tensors [B,T].

        truncation: to max_length (default: the tokenizer's), on its truncation_side. add_special_tokens: taken, and
        changes nothing: models are trained on texts without them. pad: of `pad`. Raises: UserError for a number that
        float64 does not hold; ValueError as transformers for rows of different lengths that are not padded.
        """
        single = isinstance(text, str)
        rows = self._strict([text] if isinstance(text, str) else list(text))
        kept = slice(None)
        if truncation and truncation != "do_not_truncate":
            limit = max_length or self.model_max_length
            kept = slice(-limit, None) if self.truncation_side == "left" else slice(limit)
        ids, values = [row.ids[kept] for row in rows], [row.values[kept] for row in rows]
        data: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": [[1] * len(row) for row in ids],
            "numeric_values": values,
        }
        if single and return_tensors is None:
            data = {name: found[0] for name, found in data.items()}
        return self.pad(data, padding, max_length, padding_side=padding_side, return_tensors=return_tensors, **pad)

    def pad(
        self,
        encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        padding: bool | str = True,
        max_length: int | None = None,
        *,
        padding_side: Literal["left", "right"] | None = None,
        return_tensors: str | None = None,
        **options: Any,
    ) -> BatchEncoding:
        """As transformers' tokenizers pad, and numeric_values with 0; what data collators call."""
        if not isinstance(encoded_inputs, Mapping):
            encoded_inputs = {name: [row[name] for row in encoded_inputs] for name in encoded_inputs[0]}
        inputs, side = dict(encoded_inputs), padding_side or self.padding_side
        values = inputs.pop("numeric_values", None)
        options |= {"padding": padding, "max_length": max_length, "padding_side": side}
        missing = self.tokenizer.pad_token is None
        if missing:
            self.tokenizer.pad_token_id = self.pad_token_id
        try:
            padded = self.tokenizer.pad(inputs, return_tensors=return_tensors, **options)
        finally:
            if missing:
                self.tokenizer.pad_token = None
        if values is not None:
            padded["numeric_values"] = _padded_values(values, padded["input_ids"], side)
        return padded

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """The wrapped tokenizer's, for tokens that it has. Raises: UserError for another: it would get <NUM>'s row."""
        self._check_known(new_tokens if isinstance(new_tokens, (list, tuple)) else [new_tokens])
        return int(self.tokenizer.add_tokens(new_tokens, special_tokens=special_tokens))

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any], *args: Any, **options: Any) -> int:
        """As `add_tokens`."""
        for found in special_tokens_dict.values():
            self._check_known(found if isinstance(found, (list, tuple)) else [found])
        return int(self.tokenizer.add_special_tokens(special_tokens_dict, *args, **options))

    def _check_known(self, tokens: Sequence[Any]) -> None:
        new = next((str(token) for token in tokens if str(token) not in self.tokenizer.get_vocab()), None)
        if new is not None:
            raise UserError("add_tokens", new, "tokens that the tokenizer has: the row behind them is <NUM>'s")

    def decode(
        self,
        ids: Any,
        values: Any = None,
        skip_special_tokens: bool = False,
        **ignored: Any,
    ) -> Any:
        """As `NumericalAwareTokenizer.decode`; values None: a number is written as <NUM>, for its value is not known.

        Several rows [B,T] give a list. ignored: clean_up_tokenization_spaces, for numbers would not survive it.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, int):
            ids = [ids]
        if len(ids) and not isinstance(ids[0], int):
            return self.batch_decode(ids, values, skip_special_tokens)
        if values is not None:
            return super().decode(ids, values, skip_special_tokens)
        pieces: list[list[int]] = [[]]
        for token in ids:
            if token == self.num_token_id:
                pieces.append([])
            else:
                pieces[-1].append(token)
        texts = (super(CausalQwenTokenizer, self).decode(p, [0.0] * len(p), skip_special_tokens) for p in pieces)
        return PLACEHOLDER.join(texts)

    def batch_decode(
        self, sequences: Any, values: Any = None, skip_special_tokens: bool = False, **ignored: Any
    ) -> list[str]:
        """`decode` of each row."""
        each = [None] * len(sequences) if values is None else values
        return [self.decode(row, v, skip_special_tokens) for row, v in zip(sequences, each, strict=True)]

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        chat_template: str | None = None,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **template: Any,
    ) -> Any:
        """As transformers': the text of a chat, or what `__call__` makes of it. Without a template: Qwen's own form,
        as the training takes it. template: tools, documents, add_generation_prompt, continue_final_message, ..."""
        chosen = chat_template or (None if self.tokenizer.chat_template else CHATML)
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, chat_template=chosen, **template)
        if not tokenize:
            return text
        options: dict[str, Any] = {"padding": padding, "truncation": truncation, "max_length": max_length}
        found = self(text, return_tensors=return_tensors, **options, **(tokenizer_kwargs or {}))
        return found if return_dict else found["input_ids"]


def _padded_values(values: Any, ids: Any, side: str) -> Any:
    """Values with zeros on a side, in the shape and kind (list, tensor, array) that the padded ids have; float64."""
    values = [v.tolist() if hasattr(v, "tolist") else v for v in values]
    single = bool(values) and not isinstance(values[0], (list, tuple))
    rows = []
    for row, padded in zip([values] if single else values, [ids] if single else ids, strict=True):
        own, zeros = [float(v) for v in row], [0.0] * (len(padded) - len(row))
        rows.append(zeros + own if side == "left" else own + zeros)
    found = rows[0] if single else rows
    if isinstance(ids, torch.Tensor):
        return torch.tensor(found, dtype=torch.float64)
    return np.asarray(found) if isinstance(ids, np.ndarray) else found
