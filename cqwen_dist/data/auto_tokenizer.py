"""The tokenizer as Hugging Face users know tokenizers: called on texts, found by AutoTokenizer, pushed to the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import BatchEncoding
from transformers.utils import PushToHubMixin

from cqwen_dist.config import NumberPolicy
from cqwen_dist.data.tokenizer import OWN_CLASS, NumericalAwareTokenizer

FILES = ["tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "*.jinja", "number_policy.json"]


class CausalQwenTokenizer(NumericalAwareTokenizer, PushToHubMixin):
    """What `AutoTokenizer.from_pretrained` gives for an exported folder once `cqwen_dist.auto` has been imported.

    Without this package the same folder gives the plain tokenizer, which reads numerals as words.
    """

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
        """As `NumericalAwareTokenizer.from_pretrained`; hub: revision, token, cache_dir, local_files_only."""
        folder = Path(name_or_path).expanduser()
        if not folder.is_dir() and not str(name_or_path).startswith((".", "/", "~")):
            from huggingface_hub import snapshot_download

            known = ("revision", "token", "cache_dir", "local_files_only")
            wanted = {key: value for key, value in hub.items() if key in known and value is not None}
            folder = Path(snapshot_download(str(name_or_path), allow_patterns=FILES, **wanted))
        return cls.of(NumericalAwareTokenizer.from_pretrained(folder, num_token_id, vocab_size, policy))

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """The tokenizer's own files, `number_policy.json`, and this class's name for AutoTokenizer."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        super().save_pretrained(folder)
        path = Path(folder) / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "tokenizer_class": OWN_CLASS}, indent=2) + "\n", encoding="utf-8")

    def __call__(
        self,
        text: str | Sequence[str],
        padding: bool = True,
        return_tensors: Literal["pt"] = "pt",
        padding_side: Literal["left", "right"] = "left",
    ) -> BatchEncoding:
        """input_ids, numeric_values, attention_mask [B,T] as `preprocess` gives them, padded for `generate`."""
        return BatchEncoding(self.preprocess([text] if isinstance(text, str) else list(text), padding_side))

    def __len__(self) -> int:
        return self.text_size
