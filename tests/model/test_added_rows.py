"""A base whose tokenizer leaves no row for <NUM>: rows are added, and nothing that the base has changes."""

from pathlib import Path

import pytest
import torch
from support.numerics import assert_close
from support.tiny import VOCAB, random_ids, tiny_base
from support.words import save_words
from torch import Tensor
from transformers import AutoModelForCausalLM

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError
from cqwen_dist.config.bases import rows_with_number
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.tools.export.export import export

ROWS = 128  # the next multiple of 64 above V = 101
KINDS = [("mistral", False), ("qwen2", True)]


def full_base(folder: Path, kind: str, tied: bool) -> Path:
    """A base in whose vocabulary words use every row, and its tokenizer."""
    tiny_base(kind, tied=tied).save_pretrained(folder)
    save_words(folder, VOCAB, eos_token="<|endoftext|>")
    return folder


def logits(model: CausalQwenForCausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids, torch.zeros(ids.shape), logits_to_keep=ids.shape[1]).logits


def test_rows_are_added_only_where_words_use_all() -> None:
    assert rows_with_number(49_152, 49_152, 49_152) == 49_216
    assert rows_with_number(101, 101, 101) == ROWS
    assert rows_with_number(101, 101, 127) == ROWS
    assert rows_with_number(101, 101, 7) == 101, "<NUM> is an added token of the tokenizer's own"
    assert rows_with_number(151_936, 151_665, 151_665) == 151_936
    assert (rows_with_number(101, 102, 102), rows_with_number(127, 128, 128)) == (ROWS, ROWS + 64)
    for used, number in ((101, 128), (103, 103), (90, 101), (102, 128)):
        with pytest.raises(UserError, match="no row for <NUM>"):
            rows_with_number(101, used, number)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_added_rows_hardly_change_the_bases_softmax(kind: str, tied: bool, tmp_path: Path) -> None:
    folder = str(full_base(tmp_path, kind, tied))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = random_ids(2, 9, high=VOCAB)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        z = plain.model(input_ids=ids).last_hidden_state
    causal = CausalQwenForCausalLM.from_base(folder)
    assert (causal.config.vocab_size, causal.config.added_rows) == (ROWS, ROWS - VOCAB)
    assert (causal.config.num_token_id, causal.config.used_rows) == (VOCAB, VOCAB + 1)
    with torch.no_grad():
        zeros = torch.zeros(ids.shape, dtype=torch.float64)
        assert torch.equal(causal.eval().model.features(ids, zeros), z)
    found = logits(causal, ids)
    assert_close(found[..., :VOCAB], expected, 1e-5, "logits")
    assert_close(found[..., VOCAB:], expected.mean(-1, keepdim=True).expand(2, 9, ROWS - VOCAB), 1e-5, "added logits")
    assert float(found.softmax(-1)[..., VOCAB:].max()) <= 1 / VOCAB
    assert torch.equal(causal.model.action.cls_weight[:VOCAB], plain.lm_head.weight)
    seeds = CausalQwenModel(folder)
    assert (seeds.config.num_token_id, seeds.config.added_rows) == (VOCAB, ROWS - VOCAB)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_an_export_keeps_the_rows(kind: str, tied: bool, tmp_path: Path) -> None:
    base = full_base(tmp_path / "base", kind, tied)
    causal = CausalQwenForCausalLM.from_base(str(base))
    tokenizer = NumericalAwareTokenizer.from_pretrained(base, vocab_size=VOCAB)
    source = tmp_path / "source"
    causal.save_pretrained(source)
    CausalQwenTokenizer.of(tokenizer).save_pretrained(source)
    with torch.no_grad():
        causal.model.features.embedding.num_row.normal_()
    causal.save_pretrained(source)
    again, its = load_trained(export(source, tmp_path / "whole"))
    assert (again.config.vocab_size, again.config.added_rows, its.num_token_id) == (ROWS, ROWS - VOCAB, VOCAB)
    ids = torch.tensor([[5, 9, VOCAB, 7]])
    assert_close(logits(again, ids), logits(causal, ids), 1e-5, "logits")  # its tensors are mapped, and begin anywhere
