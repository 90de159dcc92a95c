"""Heads on features that stay and on those of a base with adapters: what they learn, and what does not move."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import tiny_base

from cqwen_dist.config import UserError
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tables.benchmark import adapted_base as adapted
from cqwen_dist.tables.benchmark import digits_as_text as digit_text
from cqwen_dist.tables.benchmark.adapted_base import Adapted, KeptZ
from cqwen_dist.tables.benchmark.competitors import ARMS, Stored, digits, learnt, pinball, squared_error
from cqwen_dist.tables.benchmark.digits_as_text import DigitText

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


def test_z_is_saved_while_it_is_computed(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted, "TOLD", 2 * adapted.READ)
    said: list[str] = []

    def stopped(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KeptZ(base, "fp32", tmp_path / "z.safetensors", stopped)(PROMPTS)
    KeptZ(base, "fp32", tmp_path / "z.safetensors", said.append)(PROMPTS)
    assert said == [
        f"  the base's z: {rows}" for rows in ("0 of 160 rows", "64 of 160 rows", "0 of 96 rows", "64 of 96 rows")
    ]


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


@pytest.mark.parametrize("name", ARMS)
def test_adapters_let_a_head_learn_more_than_frozen_features(base: str, name: str) -> None:
    features, backbone = adapted_base(base, epochs=8)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    arm = ARMS[name](Y, TRAIN)
    frozen = learnt(arm, [features.still], TRAIN, VALID, TEST).scores(Y[TEST])
    adapted = learnt(arm, [features.still, features], TRAIN, VALID, TEST).scores(Y[TEST])
    assert frozen["r2"] < 0.2, "the last token does not see the number"
    assert adapted["r2"] > 0.4, "digits learn slowest"
    assert adapted["crps"] < 0.8 * frozen["crps"]
    moved = {key for key, value in backbone.state_dict().items() if not torch.equal(value, before[key])}
    assert {key.rpartition(".")[2] for key in moved if ".lora_" not in key} <= {"w_num", "num_row"}, "base to the bit"
    assert any(".lora_A." in key for key in moved)
    assert any(".lora_B." in key for key in moved)


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


def test_the_same_training_gives_the_same_bits(base: str) -> None:
    first, again = (adapted_base(base, epochs=1)[0] for _ in range(2))
    arm = pinball(Y, TRAIN)
    found = [learnt(arm, [made.still, made], TRAIN, VALID, TEST).quantiles for made in (first, again, first)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2]), "an arm before it leaves nothing behind"


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


def test_the_text_arm_learns_and_reads_a_prompt_once_for_all_samples(tmp_path: Path) -> None:
    sizes = [("small", 7.5), ("quite large", 120.0), ("enormous indeed", -3.0)]  # prompts of different lengths
    prompts, y = [f"it is {sizes[i % 3][0]}: " for i in range(90)], np.array([sizes[i % 3][1] for i in range(90)])
    model = tiny_base(vocab_size=300)
    model.lm_head.weight.data.mul_(10)  # it can be sure of a word
    model.save_pretrained(tmp_path)
    NumericalAwareTokenizer(train_tokenizer(prompts, 290), vocab_size=300).save_pretrained(tmp_path)
    text = DigitText(str(tmp_path), prompts, y, epochs=6)
    before = {key: value.clone() for key, value in text.model.state_dict().items()}
    text.learn(np.arange(60), np.arange(60, 75))
    moved = {key for key, value in text.model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert all(".lora_" in key for key in moved), "the base's weights stay as they are to the bit"
    test = np.arange(75, 90)
    assert text.write(test, 1)[:, 0].tolist() == y[test].tolist()
    sampled = text.write(test, 8)
    assert sampled.shape == (15, 8)
    assert np.nanmedian(sampled, axis=1).tolist() == y[test].tolist()
    assert np.array_equal(sampled, text.write(test, 8), equal_nan=True)
    with torch.no_grad():  # by hand: without a cache, padding or a batch
        for row in (0, 1, 2):
            ids = text.tokenizer.encode(prompts[row])[0]
            for _ in range(12):
                ids.append(int(text.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            assert text.tokenizer.decode(ids).startswith(f"{prompts[row]}{y[row]:g}<|endoftext|>")
