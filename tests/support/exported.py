"""A tiny model with its tokenizer, as an exported folder is: what loads, generates and predicts without a run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_causal_lm

from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.model import CausalQwenForCausalLM

TEXTS = ["tea costs 3.5 and milk costs 12", "we have bread and salt and rice", "he paid 1,234.50 for the tea"]
WORDS = 270
ROWS = 283


def tiny_pair(**shape: Any) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """V 283, of which 270 words at most and <NUM>; every parameter moved; it writes numbers now and then."""
    tokenizer = NumericalAwareTokenizer(train_tokenizer(TEXTS, WORDS), vocab_size=ROWS)
    shape = {"target": {"name": "standardise", "median": 150.0, "scale": 40.0}, **shape}
    model = tiny_causal_lm(num_token_id=tokenizer.num_token_id, base={"vocab_size": ROWS}, **shape)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        model.model.abduction.set_scale(0.02)
        model.model.action.threshold.fill_(1.0)
        model.model.action.threshold[tokenizer.num_token_id] = -2.0
        model.model.action.threshold[tokenizer.encode("<|im_end|>", begin=False).ids] = 1e3  # pipelines leave it out
    return model, tokenizer


def run_snippet(
    page: Path, name: str, folder: Path, capsys: pytest.CaptureFixture[str], space: dict[str, Any] | None = None
) -> list[str]:
    """Run the Python of a page on a folder instead of the one it names; the lines that it prints. space: its names."""
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert snippet.count(f'"{name}"') == 2
    capsys.readouterr()
    exec(snippet.replace(f'"{name}"', repr(str(folder))), {} if space is None else space)
    return capsys.readouterr().out.splitlines()


def write_folder(folder: Path, model: CausalQwenForCausalLM, tokenizer: NumericalAwareTokenizer) -> Path:
    """Model and tokenizer side by side."""
    model.save_pretrained(folder)
    CausalQwenTokenizer.of(tokenizer).save_pretrained(folder)
    return folder
