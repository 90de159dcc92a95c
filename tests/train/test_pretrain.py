"""Pretraining a small base: only the rows that occur, widened; further texts; numerals as numbers and as digits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import VOCAB, write_config, write_texts
from support.tiny import tiny_base

from cqwen_dist.config import UserError, load_config
from cqwen_dist.data.sources import Text
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.backbone import load_base
from cqwen_dist.train.base import build_run_base
from cqwen_dist.train.pretrain import TABLES, Mixture, read_for_pretraining, row_counts, widen

TEXTS = [Text("we pay 12.50 for tea", "a:1"), Text("salt and rice", "a:2")]


def built(folder: Path, *overrides: str) -> tuple[torch.nn.Module, list[str]]:
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    steps = ("model.pretrain.steps=8", "model.pretrain.batch_size=8")
    config = load_config(write_config(folder), [*steps, *overrides])
    build_run_base(config, said.append)
    return load_base(config.base_folder, torch.float32), said


@pytest.mark.parametrize("tied", [True, False])
def test_widening_keeps_what_was_learnt_and_copies_rare_rows(tied: bool) -> None:
    rows, counts = np.array([1, 4, 7, 9]), np.array([50, 1, 60, 70])
    small, base = tiny_base(vocab_size=4, tied=tied, seed=1), tiny_base(vocab_size=12, tied=tied, seed=2)
    widen(base, small, rows, counts, seed=0)
    given = dict(small.named_parameters())
    for name, parameter in base.named_parameters():
        if name not in TABLES:
            assert torch.equal(parameter, given[name])
            continue
        assert torch.equal(parameter[torch.from_numpy(rows)], given[name])
        added = np.setdiff1d(np.arange(12), rows)
        rare = given[name][1]  # of four rows a quarter is one: the rarest
        assert (parameter[torch.from_numpy(added)] - rare).abs().max() < rare.std(correction=0)
        assert len({tuple(row.tolist()) for row in parameter}) == 12
    ids = torch.from_numpy(rows).unsqueeze(0)
    with torch.no_grad():
        wide, narrow = base(input_ids=ids).logits[..., rows], small(input_ids=torch.arange(4).unsqueeze(0)).logits
    torch.testing.assert_close(wide, narrow)


def test_a_base_trained_on_the_occurring_rows_tells_the_same_words(tmp_path: Path) -> None:
    """Rows that never occur do not take part, so their number changes nothing but the time."""
    base, said = built(tmp_path, "model.pretrain.rows=occurring")
    assert base.get_output_embeddings().weight.shape[0] == VOCAB
    assert any(f"of {VOCAB} that occur" in line for line in said)
    assert (tmp_path / "run" / "base" / "model.safetensors").is_file()


def test_numerals_are_read_as_numbers_as_digits_or_both_ways(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    build_run_base(config, lambda text: None)
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, VOCAB)

    def counts(numerals: str) -> np.ndarray:
        return row_counts(read_for_pretraining(config, TEXTS, tokenizer, numerals), VOCAB)

    digit = tokenizer.tokenizer.encode("5", add_special_tokens=False)[0]
    numbers, digits, both = (counts(numerals) for numerals in ("numbers", "digits", "both"))
    assert (numbers[tokenizer.num_token_id], numbers[digit]) == (1, 0)
    assert (digits[tokenizer.num_token_id], digits[digit]) == (0, 1)
    assert np.array_equal(both, numbers + digits)


def test_further_texts_are_read_and_a_missing_file_is_named(tmp_path: Path) -> None:
    more = write_texts(tmp_path / "more.jsonl", 12, seed=5)
    plain, _ = built(tmp_path / "a")
    with_more, _ = built(tmp_path / "b", f"model.pretrain.data={more}")
    assert not torch.equal(plain.lm_head.weight, with_more.lm_head.weight)
    with pytest.raises(UserError, match=r"model\.pretrain\.data: found no file nowhere\.jsonl"):
        built(tmp_path / "c", "model.pretrain.data=nowhere.jsonl")


def test_a_mixture_is_its_parts_in_a_row() -> None:
    class Part:
        pad_token_id, num_token_id = 0, 3

        def __init__(self, *names: str) -> None:
            self.names = names

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int) -> str:
            return self.names[index]

    mixture = Mixture([Part("a", "b"), Part(), Part("c")])  # type: ignore[list-item]
    assert [mixture[i] for i in range(len(mixture))] == ["a", "b", "c"]
