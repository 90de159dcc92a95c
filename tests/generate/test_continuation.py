"""Text in, text out: padding, numbers in the text and in the records, the end of a row."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny import NUM, number_writing_lm
from support.words import Words, save_words

from cqwen_dist.config import UserError
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.model import CausalQwenForCausalLM

EOS = Words.eos_token_id


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    return number_writing_lm()


def test_a_batch_gives_the_output_of_each_prompt_alone(model: CausalQwenForCausalLM) -> None:
    prompts = ["w3 w8 99.9 w41 w7", "-12.5", "w60 w2"]
    together = continue_text(model, Words(), prompts, max_new_tokens=10)
    alone = [continue_text(model, Words(), [p], max_new_tokens=10)[0] for p in prompts]
    assert [w.text for w in together] == [w.text for w in alone]
    assert [w.prompt for w in together] == prompts
    assert any(w.numbers for w in together)
    for written in together:
        ids, values = Words().encode(written.text)
        assert EOS not in ids
        assert ids == [token.id for token in written.tokens]
        shown = [v for i, v in zip(ids, values, strict=True) if i == NUM]
        assert shown == [n.written for n in written.numbers]
        for token in written.tokens:
            assert 0.0 < token.p <= 1.0
            assert (token.number is not None) == (token.id == NUM)
        for number in written.numbers:
            low, high = number.intervals["0.9"]
            assert number.intervals["0.95"][0] < low < number.value < high < number.intervals["0.95"][1]
            assert number.p_num == next(t.p for t in written.tokens if t.number is number)
        json.loads(json.dumps(written.to_dict(), allow_nan=False))


def test_compatible_is_greedy_unless_a_seed_or_temperature_asks_for_draws(model: CausalQwenForCausalLM) -> None:
    def text(**options: Any) -> str:
        return continue_text(model, Words(), ["w3 w8 w41 w7"], mode="compatible", max_new_tokens=12, **options)[0].text

    greedy = text(temperature=0.0)
    assert [text() for _ in range(3)] == [greedy] * 3
    assert len({text(seed=s) for s in range(5)}) > 1


def test_digits_sets_the_written_digits_and_the_model_reads_the_written_value(model: CausalQwenForCausalLM) -> None:
    prompt = ["w3 w8 99.9 w41 w7"]
    auto, one, all_ = (continue_text(model, Words(), prompt, max_new_tokens=10, digits=d)[0] for d in ("auto", 1, 17))
    for number in (*auto.numbers, *one.numbers, *all_.numbers):
        low, high = number.intervals["0.5"]
        assert low < number.value < high
    assert all(abs(n.written - n.value) <= 0.05 * (n.intervals["0.5"][1] - n.intervals["0.5"][0]) for n in auto.numbers)
    assert all(n.written == float(f"{n.value:.1g}") for n in one.numbers)
    assert all(n.written == n.value for n in all_.numbers)
    first = [next(i for i, token in enumerate(w.tokens) if token.number is not None) for w in (auto, one, all_)]
    assert len({w.tokens[first[0]].number.value for w in (auto, one, all_)}) == 1 == len(set(first))
    at = first[0] + 1  # up to behind the first number: a prompt that ends there goes on with the same probabilities
    for written, digits in ((auto, "auto"), (one, 1), (all_, 17)):
        head = " ".join(written.text.split()[:at])
        rest = continue_text(model, Words(), [f"{prompt[0]} {head}"], max_new_tokens=10 - at, digits=digits)[0]
        assert [token.p for token in rest.tokens] == pytest.approx([t.p for t in written.tokens[at:]], rel=1e-4)
    with pytest.raises(UserError, match="digits: found 0, allowed: auto, or 1 to 17"):
        continue_text(model, Words(), prompt, digits=0)


def test_numbers_are_written_as_the_prompt_has_them(model: CausalQwenForCausalLM, tmp_path: Path) -> None:
    save_words(tmp_path, NUM, eos_token="w5", pad_token="<|endoftext|>")
    tokenizer = NumericalAwareTokenizer.from_pretrained(tmp_path, num_token_id=NUM)

    def written(stop: tuple[str, ...] = ()) -> str:
        pieces: list[str] = []
        options = {"max_new_tokens": 12, "digits": 4, "stop": stop, "on_text": pieces.append}
        (found,) = continue_text(model, tokenizer, ["w3 2.50 w41 1,024 w7"], **options)
        assert "".join(pieces) == found.text
        return re.sub("w[0-9][0-9]", " ", found.text)

    plain, own = written(stop=(",",)).split(), written().split()
    assert [*map(float, own)] == [*map(float, plain)]
    assert any(len(number.partition(".")[2]) == 1 for number in plain)
    assert all(len(number.partition(".")[2]) in (0, 2) for number in own)


def test_a_stop_string_ends_the_text_across_tokens(model: CausalQwenForCausalLM) -> None:
    prompts = ["w3 w8 w41", "w60 w2"]
    plain = continue_text(model, Words(), prompts, max_new_tokens=12)
    words = plain[0].text.split()
    string = " ".join(words[3:5])  # two tokens
    ended = continue_text(model, Words(), prompts, max_new_tokens=12, stop=[string, "w99 w98"])
    assert ended[0].text == plain[0].text[: plain[0].text.index(string) + len(string)]
    assert (ended[0].end, plain[0].end) == ("stop", "length")
    if string not in plain[1].text:
        assert ended[1].text == plain[1].text
    for stop in (string, string[:-1], " "):  # also inside a token
        pieces: list[str] = []
        (one,) = continue_text(model, Words(), prompts[:1], max_new_tokens=12, stop=[stop], on_text=pieces.append)
        assert "".join(pieces) == one.text
        assert one.text.endswith(stop)
    alone = continue_text(model, Words(), ["w3 w8 w41 " + string], max_new_tokens=2, stop=[string])[0]
    assert len(alone.tokens) == 2, "the prompt does not count"
    with pytest.raises(UserError, match="stop: found 'an empty string'"):
        continue_text(model, Words(), prompts, stop=[""])


def test_streaming_yields_the_text_as_it_is_written(model: CausalQwenForCausalLM) -> None:
    pieces: list[str] = []
    written = continue_text(model, Words(), ["w3 w8 w41"], max_new_tokens=9, on_text=pieces.append)[0]
    assert "".join(pieces) == written.text
    assert len(pieces) > 3
    assert all(pieces)
    with pytest.raises(UserError, match="stream: found '2 prompts', allowed: one"):
        continue_text(model, Words(), ["w3", "w4"], on_text=pieces.append)
