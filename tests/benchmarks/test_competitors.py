"""Heads on features that stay and on those of a base with adapters: what they learn, and what does not move."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import tiny_base

from benchmarks.numbers import digits_as_text as digit_text
from benchmarks.numbers.adapted_base import Adapted, KeptZ
from benchmarks.numbers.competitors import Stored, digits, learnt, pinball, squared_error
from benchmarks.numbers.digits_as_text import DigitText
from cqwen_dist.config import UserError
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer

Y = np.random.default_rng(0).uniform(-5, 5, 160)
PROMPTS = [f"size: {value:.3f}\nscore: " for value in Y]
TRAIN, VALID, TEST = np.arange(96), np.arange(96, 120), np.arange(120, 160)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A base whose last token sees nothing of the others: its attention's outputs are zero."""
    model = tiny_base(vocab_size=300)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    model.save_pretrained(tmp_path)
    NumericalAwareTokenizer(train_tokenizer(PROMPTS, 290), vocab_size=300).save_pretrained(tmp_path)
    return str(tmp_path)


def adapted_base(base: str, epochs: int, precision: str = "fp32") -> tuple[Adapted, torch.nn.Module]:
    """Its features with adapters, and what computes them."""
    z = KeptZ(base, precision, Path(base) / "z.safetensors", print)
    return Adapted(z.base, PROMPTS, z(PROMPTS), TRAIN, epochs), z.base.features


def test_z_is_computed_once_a_prompt(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "kept" / "z.safetensors"
    file.parent.mkdir()
    first = KeptZ(base, "fp32", file, said.append)(PROMPTS[:40])
    again = KeptZ(base, "fp32", file, said.append)
    assert torch.equal(again(PROMPTS[30:40] + PROMPTS[:5]), torch.cat([first[30:], first[:5]]))
    assert "base" not in vars(again), "nothing was read again"
    assert torch.equal(again(PROMPTS[:80])[:40], first)
    assert said == ["  the base's z: 0 of 40 rows", "  the base's z: 0 of 40 rows"]
    alone = again.base.z(again.base.encode(PROMPTS[70:71])).detach()[0]
    assert torch.allclose(again(PROMPTS[70:71])[0], alone, atol=1e-5), "whatever stood beside it in its batch"
    rounded = KeptZ(base, "bf16", file, said.append)(PROMPTS[:40])
    assert not torch.equal(rounded, first), "another precision is another z"
    assert torch.allclose(rounded, first, atol=0.02 * float(first.abs().max())), "8 bits, some products in a row"
    with pytest.raises(UserError):
        KeptZ(f"{base}/other", "fp32", file, said.append)(PROMPTS[:1])


def test_heads_learn_a_function_of_the_features() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(400, 6, generator=draw)
    y = (100 + 20 * z[:, 0] + 5 * torch.randn(400, generator=draw)).double().numpy()
    train, valid, test = np.arange(200), np.arange(200, 250), np.arange(250, 400)
    stored = Stored(z, train)
    found = learnt(squared_error(y, train), [stored], train, valid, test)
    assert found.scores(y[test])["rmse"] < 8  # 5 is the noise, 20 what can be told
    ends = found.quantiles[:, [0, -1]] @ [-1, 1] / (2 * 1.96)
    assert 4 < ends.min() <= ends.max() < 8, "the spread"
    for arm in (pinball, digits):
        scores = learnt(arm(y, train), [stored], train, valid, test).scores(y[test])
        assert scores["rmse"] < 10
        assert 0.75 < scores["coverage_90"] < 0.98


def test_every_part_gets_a_gradient_and_each_training_starts_fresh(base: str) -> None:
    features, backbone = adapted_base(base, epochs=1)
    learns = features.begin()
    rows = torch.arange(8)
    start = features(rows).detach()
    assert torch.allclose(start, features.still(rows), atol=1e-4), "a head goes on where it was"
    for parameter in learns:
        parameter.data.add_(0.1)
    changed = features(rows)
    assert not torch.equal(changed, start)
    changed.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in learns)
    learning = {id(p) for p in learns}
    assert all(p.grad is None for p in backbone.parameters() if id(p) not in learning)
    assert all(p.grad is None for p in features.begin())
    assert torch.equal(features(rows), start)


def test_samples_that_share_a_cache_do_not_see_each_other(base: str, monkeypatch) -> None:
    prompts = ["it is 7.5: ", "it was not more than 12: "]
    text = DigitText(base, prompts, np.array([7.5, 12.25]), epochs=1)
    torch.nn.init.normal_(text.model.lm_head.weight, std=2)  # other words, another law; few words are likely
    for layer in text.model.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.base_layer.weight, std=0.1)
    draws, nodes, rand, drawn = [], [], torch.rand_like, digit_text._drawn

    def recorded(like: torch.Tensor) -> torch.Tensor:
        draws.append(rand(like))
        return draws[-1]

    def counted(p: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        nodes.append(p.shape[1])
        return drawn(p, at)

    monkeypatch.setattr(torch, "rand_like", recorded)
    monkeypatch.setattr(digit_text, "_drawn", counted)
    with torch.no_grad():
        written = text._texts(np.arange(2), 40)
    assert nodes[0] == 1 < nodes[1] < 40, "copies begin alike and part"
    for row, prompt in enumerate(prompts):
        for copy in range(40):
            words = [*takewhile(lambda word: word != text._end, written[row, copy].tolist()), text._end]
            words = words[: written.shape[-1]]
            with torch.no_grad():
                ids = torch.tensor([text.tokenizer.encode(prompt)[0] + words])
                alone = text.model(input_ids=ids).logits.softmax(-1)[0, -len(words) - 1 : -1].cumsum(-1)
            for below, word, draw in zip(alone, words, draws, strict=False):
                found = float(draw[row, copy])  # fp32, in another order: 1e-5
                assert (below[word - 1] if word else 0) - 1e-5 <= found * below[-1] <= below[word] + 1e-5


def test_words_are_sampled_by_probability() -> None:
    torch.manual_seed(0)
    p = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0], [0.25, 0.0, 0.0, 0.0, 0.0, 0.75]])
    at = torch.tensor([[0, 1]]).repeat(3, 20_000)
    drawn = digit_text._drawn(p.expand(3, -1, -1), at)
    for node, law in enumerate(p):
        found = drawn[at == node].bincount(minlength=6) / 60_000
        torch.testing.assert_close(found, law, atol=0.01, rtol=0)  # five standard errors
        assert not found[law == 0].any()
