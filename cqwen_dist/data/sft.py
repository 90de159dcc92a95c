"""TRL's SFTTrainer with numbers (extra `hf-tools`). TRL prepares texts, chats and prompts with completions.

TRL's loss is a softmax over hidden states and lm_head, and TRL keeps only a text's ids. Here the model computes the
loss. The values travel inside the ids until the collator separates them.
"""

import copy
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding, DataCollatorForSeq2Seq
from trl import SFTTrainer

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer

# ChatML as the tokenizer writes it without a template, with TRL's marks around the assistant's words
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = 1 << 32  # smaller ids are words: as float64 bits they would be 0 or below 3e-314


class _ValuesInIds(CausalQwenTokenizer):
    """Encodes a number as an id with the float64's bits."""

    def _encode_plus(self, *args: Any, **given: Any) -> BatchEncoding:
        read = super()._encode_plus(*args, **given)
        rows = zip(read["input_ids"], read["numeric_values"], strict=True)
        # 0.0 would have bits 0, a word's id: -0.0 stands for it
        bits = [(int(np.float64(value or -0.0).view(np.int64)), token) for token, value in rows]
        read["input_ids"] = [own if token == self.num_token_id else token for own, token in bits]
        return read


class _TakeApart:
    """Collator: rows with such ids and labels to input_ids, numeric_values, attention_mask and labels [B,T]."""

    def __init__(self, tokenizer: CausalQwenTokenizer) -> None:
        self.num_token_id, self.pad = tokenizer.num_token_id, DataCollatorForSeq2Seq(tokenizer)

    def __call__(self, rows: list[dict[str, list[int]]]) -> Any:
        return self.pad([self._row(**row) for row in rows])

    def _row(self, input_ids: list[int], labels: list[int], **other: Any) -> dict[str, list[Any]]:
        ids, wanted = torch.tensor(input_ids), torch.tensor(labels)
        numbers, learnt = (((t < 0) & (t != IGNORE_INDEX)) | (t >= _WORDS) for t in (ids, wanted))
        return {
            "input_ids": ids.masked_fill(numbers, self.num_token_id).tolist(),
            "numeric_values": ids.view(torch.float64).masked_fill(~numbers, 0.0).tolist(),
            "labels": wanted.masked_fill(learnt, self.num_token_id).tolist(),
        }


class CausalQwenSFTTrainer(SFTTrainer):
    """TRL's trainer for a CausalQwen and `CausalQwenTokenizer`. Raises: UserError for packing and padding_free."""

    def __init__(self, model: Any, args: Any = None, *, processing_class: CausalQwenTokenizer, **given: Any) -> None:
        for odd in ("packing", "padding_free"):
            if getattr(args, odd, False):
                raise UserError(odd, True, "False: `cqwen train` packs")
        if getattr(args, "assistant_only_loss", False) and processing_class.chat_template is None:
            processing_class = copy.copy(processing_class)
            processing_class.chat_template = _CHATML
        collator = _TakeApart(processing_class)
        super().__init__(model, args, data_collator=collator, processing_class=processing_class, **given)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, *rest: Any) -> Any:
        carrying = copy.copy(processing_class)
        carrying.__class__ = _ValuesInIds
        return super()._prepare_dataset(dataset, carrying, *rest)

    def compute_loss(self, *args: Any, **given: Any) -> Any:
        # Skip SFTTrainer's method, which computes a softmax loss and needs logits.
        return super(SFTTrainer, self).compute_loss(*args, **given)
