"""Digits in view (`data.keep_digits`): a base reads its own numerals; they are not learnt, and write themselves."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.numerics import assert_close
from support.tiny import NUM, number_writer, random_ids
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.config.data import DataConfig, NumberPolicy
from cqwen_dist.config.shape import CHARACTERS
from cqwen_dist.data.collate import collate
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import Text
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.data.write_numbers import in_decimals
from cqwen_dist.generate.generator import generate
from cqwen_dist.heads.expression import VALUE, at_beginning, read_tokens, symbol_table
from cqwen_dist.heads.numerals import characters, given_digits
from cqwen_dist.model import CausalQwenForCausalLM

ROWS = list(range(10, 22))  # of CHARACTERS in the tiny vocabulary
TEXT = "She pays 48 + 1,024.50 = 1072.5 dollars, then -7. In 2021-03-04 0.1 came."


def written(row: list[int]) -> str:
    return "".join(CHARACTERS[code] for code in row if code >= 0)


@given(st.one_of(st.floats(), st.decimals(-(10**7), 10**7, places=4).map(float), st.integers(-(10**16), 10**16)))
@example(0.1 + 0.2)
@example(999_999.9999999)
@example(1e9 - 0.5)
@example(-0.0)
def test_tensors_write_what_python_writes(value: float) -> None:
    value = float(value)
    found = written(characters(torch.tensor([value], dtype=torch.float64))[0].tolist())
    assert found == in_decimals(value)
    if abs(value) < 1e9 and value == round(value, 6):
        assert float(found) == value


def tokenizer(**policy: bool) -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer(train_tokenizer([TEXT + " 0123456789-."] * 3, 300), policy=NumberPolicy(**policy))


def test_a_text_reads_as_the_bases_own_and_comes_back() -> None:
    kept, plain = tokenizer(digits=True), tokenizer()
    ids, values = kept.encode(TEXT)
    assert kept.decode(ids, values) == plain.decode(*plain.encode(TEXT))
    assert [value for value in values if value] == [value for value in plain.encode(TEXT).values if value]
    shown = [
        kept.digit_rows[CHARACTERS.index(in_decimals(v)[0])] if v else token
        for token, v in zip(ids, values, strict=True)
    ]
    assert kept.tokenizer.decode(shown) == TEXT.replace("1,024.50", "1024.5")
    assert plain.digit_rows == []


def test_only_numbers_and_words_are_learnt() -> None:
    kept = tokenizer(digits=True)
    texts = [Text(TEXT, "a:1"), Text(TEXT, "a:2", learnt=[(0, 30)])]
    config = DataConfig(train="a")
    sets = [tokenise(texts, own, config) for own in (kept, tokenizer())]
    for row in range(2):
        with_digits, without = (collate([each[row]], pad_token_id=0, num_token_id=kept.num_token_id) for each in sets)
        assert with_digits.input_ids.shape > without.input_ids.shape
        for name, none in (("labels", IGNORE_INDEX), ("numeric_labels", 0.0)):
            ours, theirs = getattr(with_digits, name)[0], getattr(without, name)[0]
            assert ours[ours != none].tolist() == theirs[theirs != none].tolist()
        number = with_digits.input_ids == kept.num_token_id
        behind = given_digits(number, with_digits.numeric_values)
        assert int(behind.sum()) > 0
        assert (with_digits.labels[:, :-1][behind[:, 1:]] == IGNORE_INDEX).all()


def model(**shape: object) -> CausalQwenForCausalLM:
    net = number_writer(digit_rows=ROWS, **shape)
    return CausalQwenForCausalLM(net.config, net).eval()


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """ids, values, mask [2,8]: the second ends within a numeral, 12 of 12.5."""
    ids, values, mask = random_ids(2, 8, seed=5, high=9), torch.zeros(2, 8, dtype=torch.float64), torch.ones(2, 8)
    mask[0, :3] = 0
    ids[1, 6:], values[1, 6] = torch.tensor([NUM, ROWS[2]]), 12.5
    return ids, values, mask


def assert_writes_whole_numerals(ids: Tensor, values: Tensor, start: int) -> int:
    """Every numeral that is whole stands behind its <NUM>; returns their number."""
    count = 0
    for row, own in zip(ids.tolist(), values.tolist(), strict=True):
        for at in range(start, len(row)):
            rest = [ROWS[CHARACTERS.index(c)] for c in in_decimals(own[at])[1:]] if row[at] == NUM else []
            end = min(at + 1 + len(rest), len(row))
            assert row[at + 1 : end] == rest[: end - at - 1]
            count += row[at] == NUM
    return count


def test_a_number_that_is_written_brings_its_digits() -> None:
    lm, (ids, values, mask) = model(), prompts()
    options = {"attention_mask": mask, "max_new_tokens": 40, "digits": 3}
    found, numbers = generate(lm.model, ids, values, **options)
    assert found[1, 8:10].tolist() == [ROWS[CHARACTERS.index(".")], ROWS[5]]
    assert assert_writes_whole_numerals(found, numbers.values, 8) >= 4
    given = given_digits(found == NUM, numbers.values)[:, 8:]
    assert torch.equal(numbers.given[:, 8:], given)
    assert (numbers.p_word[:, 8:][given] == 1).all()
    for more in ({"use_cache": False}, {"cache_implementation": "static"}):
        again, _ = generate(lm.model, ids, values, **options, **more)
        assert torch.equal(found, again)
    alone, _ = generate(lm.model, ids[:1, 3:], values[:1, 3:], max_new_tokens=40, digits=3)
    assert torch.equal(found[0, 8:], alone[0, 5:])


def test_loops_of_transformers_write_digits_too() -> None:
    lm, (ids, values, mask) = model(), prompts()
    options = {"attention_mask": mask, "max_new_tokens": 24, "digits": 3, "eos_token_id": [], "return_numbers": True}
    for mode, more in (("compatible", {"num_beams": 3}), ("standard", {"output_scores": True})):
        found, numbers = lm.generate(ids, values, mode=mode, return_dict_in_generate=False, **options, **more)
        assert assert_writes_whole_numerals(found, numbers.values, 8) >= 1
    ours, _ = generate(lm.model, ids, values, attention_mask=mask, max_new_tokens=24, digits=3)
    assert torch.equal(ours, found)


def test_the_base_reads_its_own_digits() -> None:
    lm = model()
    embedding = lm.model.features.embedding
    ids, values = torch.tensor([[3, NUM, ROWS[8], 5]]), torch.tensor([[0.0, 48.0, 0.0, 0.0]])
    with torch.no_grad():
        embedding.w_num.zero_()
        own = embedding.token_embedding(torch.tensor([[3, ROWS[4], ROWS[8], 5]]))
        assert torch.equal(embedding(ids, values), own)
        big = embedding(torch.tensor([[NUM]]), torch.tensor([[1e30]]))  # no characters: <NUM>'s own row
        assert_close(big, embedding.token_embedding(torch.tensor([[NUM]])), 1e-6, "own row")


def test_labels_of_hugging_face_leave_digits_out() -> None:
    lm = model()
    ids, values = torch.tensor([[3, NUM, ROWS[8], 5, 7]]), torch.tensor([[0.0, 48.0, 0.0, 0.0, 0.0]])
    without = ids.clone()
    without[0, 2] = IGNORE_INDEX
    loss = lm(ids, values, labels=ids).loss
    assert torch.equal(loss, lm(ids, values, labels=without).loss)
    assert not torch.equal(loss, lm(ids, values, labels=ids.masked_fill(ids == 7, IGNORE_INDEX)).loss)


def test_an_expression_is_read_through_its_digits() -> None:
    kept = tokenizer(digits=True)
    assert not {*kept.digit_rows[:10]} - {*kept.symbols[""]}
    ids, values = kept.encode("pays 48 + 1,024.50 =")
    table = symbol_table(kept.symbols, kept.num_token_id + 1, kept.num_token_id)
    state = at_beginning(1, torch.device("cpu"))
    for token, value in zip(ids, values, strict=True):
        state = read_tokens(state, table[[token]], torch.tensor([value], dtype=torch.float64))
    assert float(state[0, VALUE]) == 1072.5
