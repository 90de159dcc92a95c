"""At the start, on real prompts: compatible is the base's own generate; batches are single runs, cached or not."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from support.shared import shared_path
from torch import Tensor
from transformers import AutoTokenizer

from cqwen_dist.generate.generator import generate
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.base_loading import build_base

PROMPTS, AT_ONCE, NEW = 200, 25, 8
VOCAB, NUM = 151_936, 151_665


@pytest.fixture(scope="module")
def questions() -> list[list[int]]:
    """200 GSM8K questions as plain Qwen2.5 token ids, digits and all, the last 96."""
    tokenizer = AutoTokenizer.from_pretrained(shared_path("tokenizers/qwen2.5"))
    with shared_path("data/gsm8k/train.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(next(file))["question"] for _ in range(PROMPTS)]
    return [ids[-96:] for ids in tokenizer(texts)["input_ids"]]


def left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = torch.tensor(row), 1
    return ids, mask


@pytest.mark.slow
def test_compatible_equals_hugging_face_on_200_gsm8k_prompts(questions: list[list[int]]) -> None:
    """The real vocabulary, a small random base whose logits differ visibly; greedy, then sampled with one seed."""
    base = build_base(
        {
            "model_type": "qwen2",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
        },
        seed=0,
    ).eval()
    # A generated <NUM> goes back in with its value, which the base does not know: w_num is 0.
    model = CausalQwenModel.from_base_model(copy.deepcopy(base), start="seed", num_token_id=NUM, w_num_scale=0.0).eval()
    causal = CausalQwenForCausalLM(model.config, model).eval()
    for start in range(0, PROMPTS, AT_ONCE):
        ids, mask = left_padded(questions[start : start + AT_ONCE])
        for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 40, "temperature": 0.8}):
            torch.manual_seed(start)
            expected = base.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, **sampling)
            torch.manual_seed(start)
            found = causal.generate(
                ids, attention_mask=mask, mode="compatible", max_new_tokens=NEW, pad_token_id=0, **sampling
            )
            assert torch.equal(found, expected), f"prompts from {start} on, {sampling}"
        if start == 0:
            batch, _ = generate(model, ids, attention_mask=mask, max_new_tokens=NEW)
            plain, _ = generate(model, ids, attention_mask=mask, max_new_tokens=NEW, use_cache=False)
            assert torch.equal(batch, plain)
            for row, question in enumerate(questions[:AT_ONCE]):
                alone, _ = generate(model, torch.tensor([question]), max_new_tokens=NEW)
                assert torch.equal(alone[0, len(question) :], batch[row, ids.shape[1] :])
