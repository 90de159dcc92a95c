"""A real base, SmolLM2-135M out of `make base`: a Llama in whose vocabulary words use every row. Skipped without it."""

import json
from pathlib import Path

import pytest
import torch
from support.runs import train_run
from support.shared import real_base
from transformers import AutoModelForCausalLM, AutoTokenizer

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import Config
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.sizes.architecture import Architecture, read_architecture

TEXTS = [
    "Tom has 1234 apples in 3 bags, and sells them at $0.5 each.\n\n  12 o'clock, don't be late!",
    "<|im_start|>user\nWhat is 5 + 6?<|im_end|>\n<|im_start|>assistant\n11<|im_end|>\n",
    "naïve — 价格是99.9元 and   spaces\t\n 7",
]


def test_the_tokenizer_cuts_text_between_numbers_as_the_plain_one() -> None:
    plain = AutoTokenizer.from_pretrained(real_base())
    assert plain.tokenize("1234 a1") == ["1", "2", "3", "4", "Ġa", "1"]
    assert (plain.eos_token, plain.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert "You are a helpful AI assistant named SmolLM" in plain.chat_template
    tokenizer = NumericalAwareTokenizer.from_pretrained(real_base())
    assert tokenizer.num_token_id == len(plain) == 49_152
    for text in TEXTS:
        ids, values = tokenizer.encode(text)
        expected, position = [], 0
        for start, end, _ in find_numbers(text, tokenizer.policy):
            expected += [*plain(text[position:start]).input_ids, tokenizer.num_token_id]
            position = end
        assert ids == expected + plain(text[position:]).input_ids
        assert tokenizer.decode(ids, values) == text
        assert list(tokenizer.encoder.read([text, "x" * (1 << 15)])[0].ids) == ids
        assert DigitTokenizer(plain).encode(text)[0] == plain(text).input_ids


@torch.no_grad()
def test_the_bases_logits_and_planned_size_equal_the_originals() -> None:
    folder = str(real_base())
    ids = AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = base(input_ids=ids).logits
    model = CausalQwenForCausalLM.from_base(folder).eval()
    config = model.config
    assert (config.vocab_size, config.added_rows, config.num_token_id, config.used_rows) == (49_216, 64, 49_152, 49_153)
    z = model.model.features(ids, torch.zeros(ids.shape, dtype=torch.float64))
    # the same products, of weights that lie elsewhere in memory: a last bit may differ (logits of order 30)
    torch.testing.assert_close(z @ model.model.action.cls_weight[:49_152].T, wanted, atol=1e-4, rtol=1e-5)
    assert float((model(ids, logits_to_keep=ids.shape[1]).logits[..., :49_152] - wanted).abs().max()) < 1e-3
    planned = Architecture.of(
        read_architecture(Config.model_validate({"model": {"name_or_path": folder}, "data": {"train": "x"}}))
    )
    assert planned.vocab == 49_216
    assert planned.backbone_parameters == sum(p.numel() for p in base.model.parameters()) - 49_152 * 576


@pytest.mark.slow
def test_the_base_trains(tmp_path: Path) -> None:
    """The seeds' start, as nothing is searched then."""
    texts = tmp_path / "texts.jsonl"
    lines = [f"Tom has {i + 3} apples and buys {2 * i} more, so he has {3 * i + 3} apples." for i in range(8)]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{name_or_path: {real_base()}}}\nstart: seed\n"
        f"data: {{train: {texts}, sequence_length: 32, eval_fraction: 0.25}}\n"
        "stages: [{name: heads, train: [regression], steps: 2}]\n"
        f"train: {{global_batch_size: 2, micro_batch_size: 2}}\nrun: {{dir: {tmp_path / 'run'}}}\n",
        encoding="utf-8",
    )
    train_run(path)
    model, tokenizer = load_trained(tmp_path / "run")
    assert (model.config.added_rows, tokenizer.num_token_id) == (64, 49_152)
