"""A word in a spare row: it is learnt alone, and nothing else of the model changes (S4 3.3.1)."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support.exported import TEXTS, tiny_pair
from support.numerics import assert_close
from support.tiny import random_ids
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from cqwen_dist import UserError, load
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.ops.cauchy import Cauchy
from experiments.taught_words import HOLD, add_words, fitted_row

WORD = " refund"
PROMPTS = [f"{item} costs {price} and" for item in ("tea", "milk", "salt") for price in (3.5, 12)]
OTHERS = ["we have bread and salt and", "he paid 1,234.50 for the", "rice and", "we have"]
READ = "no refund for 3.5, nor for <NUM>: a refund"


@torch.no_grad()
def answers(model: Any) -> list[Any]:
    """What the model says of two texts."""
    ids = random_ids(2, 7)
    given: Any = {"numeric_values": torch.zeros(ids.shape, dtype=torch.float64), "output_scales": True}
    return [model(ids, output_log_probs=True, **given)]


@torch.no_grad()
def p_of(model: Any, tokenizer: Any, prompt: str, row: int) -> torch.Tensor:
    return model(**tokenizer(prompt, return_tensors="pt"), output_log_probs=True).log_probs[0, :, row].exp()


@pytest.fixture(scope="module")
def learnt() -> SimpleNamespace:
    """A tiny model that has learnt a word; its tensors, answers and tokenizer from before."""
    model, reader = tiny_pair()
    with torch.no_grad():
        model.model.action.threshold[-12:] = 5.0  # of spare rows
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said, old = answers(model), CausalQwenTokenizer.of(reader)
    tokenizer = add_words(model, old, {WORD: PROMPTS}, OTHERS)
    row = model.config.used_rows - 1
    return SimpleNamespace(model=model, before=before, said=said, old=old, tokenizer=tokenizer, row=row)


def test_the_row_is_the_least_loss_of_the_word_and_of_the_distance_to_the_start() -> None:
    g, comes = torch.Generator().manual_seed(3), torch.arange(60) < 9
    loc = torch.randn(60, 4, generator=g, dtype=torch.float64) + comes[:, None] * torch.tensor([1.0, -0.5, 0, 0.2])
    u = Cauchy(loc, 0.1 + torch.rand(60, 4, generator=g, dtype=torch.float64))
    x, s, y = loc.numpy(), u.scale.numpy(), comes.numpy()
    (start, _), (weight, bias) = fitted_row(u, comes, hold=1e9), fitted_row(u, comes)

    def loss(at: np.ndarray) -> float:
        p = 0.5 + np.arctan((x @ at[:4] + at[4]) / (s @ np.abs(at[:4]))) / math.pi
        return float(-np.log(np.where(y, p, 1 - p)).sum() + HOLD * y.sum() * ((at[:4] - start.numpy()) ** 2).sum())

    exact = {"maxiter": 9000, "fatol": 1e-12, "xatol": 1e-9}
    best = minimize(loss, np.append(start.numpy(), 0.0), method="Nelder-Mead", options=exact).x
    found = np.append(weight.numpy(), float(bias)) * np.linalg.norm(best[:4])
    np.testing.assert_allclose(found, best, atol=1e-3)
    assert torch.equal(fitted_row(u, comes)[0], weight)


def test_only_the_new_row_changes(learnt: SimpleNamespace) -> None:
    model, row, tokenizer = learnt.model, learnt.row, learnt.tokenizer
    assert (row, model.model.config.used_rows, len(tokenizer)) == (tokenizer.num_token_id + 1, row + 1, row + 1)
    changed = {name: (value != learnt.before[name]).nonzero() for name, value in model.state_dict().items()}
    changed = {name.rpartition(".")[2]: at[:, 0].unique().tolist() for name, at in changed.items() if len(at)}
    assert changed == {key: [row] for key in ("weight", "cls_weight", "cls_bias", "threshold")}
    table, spelt = model.get_input_embeddings().weight, learnt.old.reader.encode(WORD)[0]
    assert_close(table[row], table[spelt].mean(0), 1e-6, "the mean of the rows that spelt it")


def test_S_C_P_and_Y_of_all_others_stay_to_the_bit(learnt: SimpleNamespace) -> None:
    rest = torch.arange(learnt.model.config.vocab_size) != learnt.row
    for a, b in zip(learnt.said, answers(learnt.model), strict=True):
        assert all(torch.equal(a[name][..., rest], b[name][..., rest]) for name in ("logits", "scale_S", "log_probs"))
        assert all(torch.equal(a[name], b[name]) for name in ("loc_U", "scale_U", "loc_Y", "scale_Y"))
        assert torch.isfinite(b["logits"][..., learnt.row]).all(), "it may be written"


def test_it_comes_after_its_prompts_alone(learnt: SimpleNamespace) -> None:
    for prompt in (*PROMPTS, *OTHERS):
        p = p_of(learnt.model, learnt.tokenizer, prompt, learnt.row)
        assert (bool(p[-1] > 0.5), float(p[:-1].max()) < 0.5) == (prompt in PROMPTS, True), prompt


def test_several_words_may_follow_one_text_and_one_threshold_stays() -> None:
    model, reader = tiny_pair()
    model.config.scalar_threshold = model.model.action.scalar_threshold = True
    model.model.action.threshold = torch.nn.Parameter(torch.tensor([1.0]))
    tokenizer = add_words(model, reader, {WORD: PROMPTS, " cash": [*PROMPTS, *OTHERS[2:]]}, OTHERS)
    rows = [tokenizer.encode(word)[0][0] for word in (WORD, " cash")]
    assert (rows, model.model.action.threshold.tolist()) == ([row + reader.num_token_id for row in (1, 2)], [1.0])
    assert min(p_of(model, CausalQwenTokenizer.of(tokenizer), PROMPTS[0], row)[-1] for row in rows) > 0.5


def test_the_taught_model_is_saved_and_its_own_code_reads_the_word(learnt: SimpleNamespace, tmp_path: Path) -> None:
    learnt.model.save_pretrained(folder := tmp_path / "out")
    learnt.tokenizer.save_pretrained(folder)
    again, loaded = load(folder, "cpu")
    own = get_class_from_dynamic_module("tokenization_causal_qwen.CausalQwenTokenizer", folder).from_pretrained(folder)
    for reader in (loaded, own, learnt.tokenizer):
        found = reader(READ)
        assert found["input_ids"].count(learnt.row) == 2
        assert [value for value in found["numeric_values"] if value] == [3.5]
        assert reader.decode(found["input_ids"], found["numeric_values"]) == READ
    assert all(loaded(text).data == learnt.old(text).data for text in TEXTS)
    for prompt in PROMPTS:
        assert_close(*(p_of(*pair, prompt, learnt.row) for pair in ((again, loaded), (learnt.model, own))), 1e-4, "P")
    further = add_words(again, loaded, {"cash": PROMPTS[:1]}, OTHERS)
    assert further.convert_tokens_to_ids("cash") == learnt.row + 1 == again.config.used_rows - 1
    assert further("cashed")["input_ids"] == loaded("cashed")["input_ids"], "within other letters it is no word"
    assert further.num_token_id == learnt.row - 1


def test_what_cannot_be_added_is_refused_in_a_sentence() -> None:
    model, tokenizer = tiny_pair()
    for words, others, message in (
        ({}, OTHERS, "at least 1"),
        ({" ": PROMPTS}, OTHERS, "a letter or a sign"),
        ({" and": PROMPTS}, OTHERS, "not yet one token"),
        ({" route 66": PROMPTS}, OTHERS, "without digits"),
        ({" a<|im_end|>": PROMPTS}, OTHERS, "no added or control token"),
        ({"\u00e9": PROMPTS, "e\u0301": PROMPTS}, OTHERS, "each word once"),
        ({" cost": PROMPTS}, OTHERS, "no token begins, such as .costs"),
        ({WORD: []}, OTHERS, "one at least"),
        ({WORD: PROMPTS}, [None], "prompt: .*a text"),
        ({WORD: ["t"]}, ["t"], "differ from no other text"),
        ({f" new{c}": PROMPTS for c in "abcdefghijklmnop"}, OTHERS, "at most 12: the rows that are spare"),
    ):
        with pytest.raises(UserError, match=message):
            add_words(model, tokenizer, words, others)
    assert model.config.used_rows == tokenizer.num_token_id + 1
