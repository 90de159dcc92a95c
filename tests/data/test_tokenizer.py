"""Numbers as tokens: the seeds' example, the exact way back, the row of <NUM>."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import policies, texts
from support.shared import shared_path
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cqwen_dist.config import NumberPolicy, UserError
from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.data import encoder
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer, train_tokenizer

CORPUS = [f"A patient aged {a} weighs {a * 1.5} kg, 价格是{a}元.\n" for a in range(20, 60)]


@pytest.fixture(scope="module")
def small() -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer(train_tokenizer(CORPUS, 320))


@pytest.fixture(scope="module")
def qwen() -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer.from_pretrained(shared_path("tokenizers/qwen2.5"), vocab_size=151_936)


def test_encodes_the_seeds_example_with_the_real_vocabulary(qwen: NumericalAwareTokenizer) -> None:
    # Seed S0 1.1: 价格 | 是 | <NUM> | 元 with 0, 0, 99.9, 0.
    ids, values = qwen.encode("价格是99.9元")
    assert [qwen.tokenizer.decode([i]) for i in ids if i != qwen.num_token_id] == ["价格", "是", "元"]
    assert ids.index(qwen.num_token_id) == 2
    assert values == [0.0, 0.0, 99.9, 0.0]
    assert qwen.decode(ids, values) == "价格是99.9元"


@pytest.mark.parametrize(("vocab_size", "reserved"), [(151_936, 271), (152_064, 399)])
def test_num_is_the_first_reserved_row(qwen: NumericalAwareTokenizer, vocab_size: int, reserved: int) -> None:
    checked = NumericalAwareTokenizer(qwen.tokenizer, vocab_size=vocab_size)
    assert checked.num_token_id == len(qwen.tokenizer) == 151_665
    assert vocab_size - checked.text_size == reserved


def test_text_between_numbers_is_cut_as_qwen_cuts_it(qwen: NumericalAwareTokenizer) -> None:
    text = "It costs 5 dollars, not 7.\n"
    ids, values = qwen.encode(text)
    plain = qwen.tokenizer.encode(text)
    digits = {qwen.tokenizer.encode(d)[0] for d in "57"}
    assert [i if i not in digits else qwen.num_token_id for i in plain] == ids
    assert [v for v in values if v] == [5.0, 7.0]


@settings(max_examples=150)
@given(texts, policies)
def test_decoded_text_gives_the_same_ids_and_values(small, text, policy) -> None:
    _round_trip(NumericalAwareTokenizer(small.tokenizer, policy=policy), text)


@settings(max_examples=150)
@given(texts)
def test_decoded_text_gives_same_ids_and_values_with_real_vocabulary(qwen: NumericalAwareTokenizer, text: str) -> None:
    _round_trip(qwen, text)


def _round_trip(tokenizer: NumericalAwareTokenizer, text: str) -> None:
    first = tokenizer.encode_batch([text])[0]
    second = tokenizer.encode_batch([tokenizer.decode(first.ids, first.values)])[0]
    assert second.ids == first.ids
    assert [repr(v) for v in second.values] == [repr(v) for v in first.values]


@pytest.mark.parametrize(
    "text",
    [
        "It costs 5 dollars.",
        " 5  6 ",
        "价格是99.9元",
        "48/2=24\n#### 24",
        "v1.2.3 on 2024-01-31 at 12:30",
        "-5--3",
        "é 0.5",
    ],
)
def test_plain_text_comes_back_letter_by_letter(small: NumericalAwareTokenizer, text: str) -> None:
    assert small.decode(*small.encode(text)) == text


def test_values_survive_other_number_formats(small: NumericalAwareTokenizer) -> None:
    ids, values = small.encode("1,234.50 and １２．５ and 1E3")
    assert small.decode(ids, values) == "1234.5 and 12.5 and 1000"


def test_adjacent_generated_numbers_stay_two(small: NumericalAwareTokenizer) -> None:
    num = small.num_token_id
    assert small.decode(torch.tensor([num, num]), torch.tensor([1.0, 2.0])) == "1 2"
    assert small.decode([num], [math.nan]) == "nan"
    with pytest.raises(ValueError, match="2 ids, but 1 values"):
        small.decode([num, num], [1.0])


def test_numbers_stay_apart_where_the_special_token_between_them_is_left_out(small: NumericalAwareTokenizer) -> None:
    end, number = small.eos_token_id, small.num_token_id
    assert small.decode([number, end, end, number], [5.0, 0, 0, 2.5], skip_special_tokens=True) == "5 2.5"


def test_preprocess_pads_on_the_right(small: NumericalAwareTokenizer) -> None:
    batch = small.preprocess(["价格是99.9元", "A patient aged 21 weighs 2 kg", ""])
    assert batch.keys() == {"input_ids", "numeric_values", "attention_mask"}
    assert batch["input_ids"].shape == batch["numeric_values"].shape == batch["attention_mask"].shape
    assert (batch["input_ids"].dtype, batch["numeric_values"].dtype) == (torch.int64, torch.float64)
    lengths = batch["attention_mask"].sum(1)
    assert lengths.tolist() == [len(small.encode(t)[0]) for t in ("价格是99.9元", "A patient aged 21 weighs 2 kg", "")]
    padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == small.pad_token_id).all()
    assert (batch["numeric_values"][padding] == 0).all()
    is_number = batch["input_ids"] == small.num_token_id
    assert batch["numeric_values"][is_number].tolist() == [99.9, 21.0, 2.0]
    assert (batch["numeric_values"][~is_number] == 0).all()
    left = small.preprocess(["价格是99.9元", "A patient aged 21 weighs 2 kg", ""], padding_side="left")
    for name, tensor in batch.items():
        for row, moved, length in zip(tensor, left[name], lengths.tolist(), strict=True):
            assert torch.equal(moved[len(moved) - length :], row[:length])
            assert torch.equal(moved[: len(moved) - length], row[length:])


def test_a_literal_num_in_the_text_is_text(small: NumericalAwareTokenizer, qwen: NumericalAwareTokenizer) -> None:
    for tokenizer in (small, qwen):
        ids, values = tokenizer.encode("a <NUM> b")
        assert tokenizer.num_token_id not in ids
        assert tokenizer.decode(ids, values) == "a <NUM> b"


def test_a_literal_num_is_text_even_where_num_is_an_added_token() -> None:
    # The seeds' older variant (S1 4.1.1): <NUM> added to the tokenizer, its id given.
    inner = train_tokenizer(CORPUS, 320)
    inner.add_tokens(["<NUM>"])
    number = inner.convert_tokens_to_ids("<NUM>")
    tokenizer = NumericalAwareTokenizer(inner, num_token_id=number)
    ids, values = tokenizer.encode("a <NUM> b 5<NUM>")
    assert [v for i, v in zip(ids, values, strict=True) if i == number] == [5.0]
    assert tokenizer.decode(ids, values) == "a <NUM> b 5<NUM>"


def sentence_piece(scheme: str) -> PreTrainedTokenizerFast:
    """As Llama-2's and Mistral-7B's: a space before every text, taken away again when it is written."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, max_token_length=9, show_progress=False)
    tokenizer.train_from_iterator([f"A man aged {a} paid ${a}. He paid twice.\n" for a in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("scheme", ["legacy", "first", "always"])
def test_a_tokenizer_that_prepends_a_space_reads_pieces_without_it(scheme: str) -> None:
    """Else "5 apples" comes back as "5apples", and a "." behind a number is read as " ."."""
    plain = sentence_piece(scheme)
    before = plain.backend_tokenizer.to_str()
    tokenizer = NumericalAwareTokenizer(plain)
    for text in ("He paid $5. He", "5 apples", "a  b 3", " x 4</s>y 5", "\n 7", "été 8 "):
        ids, values = tokenizer.encode(text)
        assert tokenizer.decode(ids, values) == text
        in_bulk = tokenizer.encoder.read([text, "x" * (1 << 15)])[0]
        assert list(in_bulk.ids) == ids
    assert tokenizer.encode("$5.")[0][-1] == plain.convert_tokens_to_ids(".")
    assert plain.backend_tokenizer.to_str() == before


def test_a_full_vocabulary_gets_rows_and_one_too_small_is_refused(small: NumericalAwareTokenizer) -> None:
    size = len(small.tokenizer)
    assert small.rows_for(size) == (size // 64 + 1) * 64
    assert small.rows_for(size + 1) == size + 1
    assert NumericalAwareTokenizer(small.tokenizer, vocab_size=size).num_token_id == size
    with pytest.raises(UserError, match=f"no row for <NUM>: id {size} .*below the model's vocabulary size {size - 2}"):
        NumericalAwareTokenizer(small.tokenizer, vocab_size=size - 2)
    assert NumericalAwareTokenizer(small.tokenizer, vocab_size=size + 1).num_token_id == size
    with pytest.raises(UserError, match="no row for <NUM>"):
        NumericalAwareTokenizer(small.tokenizer, vocab_size=size + 1, num_token_id=size + 1)
    for word in (5, -1, small.eos_token_id):
        with pytest.raises(UserError, match=f"a reserved row, {size} or above"):
            NumericalAwareTokenizer(small.tokenizer, num_token_id=word)


@pytest.mark.parametrize(
    "literal",
    ["1e999", "9007199254740993", "-9007199254740993", "110101199003070011", "12345678901234567890", "9" * 5000],
)
def test_numerals_that_float64_does_not_hold_stay_text(small: NumericalAwareTokenizer, literal: str) -> None:
    text = f"about {literal} or 5"
    (reading,) = small.encoder.read([text])
    assert (reading.overflows, reading.numbers) == ([literal], [5.0])
    encoded = small.encode(text)
    assert sorted(encoded.values)[-1] == 5.0
    assert small.decode(encoded.ids, encoded.values) == text


@pytest.mark.parametrize(
    "literal", ["9007199254740992", "9007199254740994", "123456789012345", "1e22", "0.1234567890123456"]
)
def test_long_numerals_that_are_quantities_stay_numbers(small: NumericalAwareTokenizer, literal: str) -> None:
    assert small.encode(literal).values[-1] == float(literal)


def test_a_lone_surrogate_is_refused_in_one_line(small: NumericalAwareTokenizer) -> None:
    """Python makes one of a byte on the command line that is not UTF-8."""
    with pytest.raises(UserError, match=r"text: found '\\udcff', allowed: Unicode text"):
        small.encode("tea \udcff 5")


def test_a_missing_broken_or_slow_tokenizer_is_refused(small: NumericalAwareTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.tokenizer: found no folder .*nowhere, allowed: a folder or hub name"):
        NumericalAwareTokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"^model\.tokenizer"):
        NumericalAwareTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="a fast tokenizer"):
        NumericalAwareTokenizer(object())
    small.save_pretrained(tmp_path)
    (tmp_path / POLICY_FILE).write_text("{}")
    with pytest.raises(UserError, match="the file as save_pretrained wrote it"):
        NumericalAwareTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"broken": 1}')
    with pytest.raises(UserError, match=r"^model\.tokenizer"):
        NumericalAwareTokenizer.from_pretrained(tmp_path)


def test_saved_and_loaded_again(small: NumericalAwareTokenizer, tmp_path: Path) -> None:
    policy = NumberPolicy(leading_zeros=True)
    NumericalAwareTokenizer(small.tokenizer, num_token_id=333, policy=policy).save_pretrained(tmp_path)
    assert json.loads((tmp_path / POLICY_FILE).read_text())["num_token_id"] == 333
    loaded = NumericalAwareTokenizer.from_pretrained(tmp_path, vocab_size=400)
    assert (loaded.num_token_id, loaded.policy) == (333, policy)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (small.eos_token_id, small.pad_token_id)
    text = "A patient aged 007, 价格是99.9元"
    assert loaded.encode(text) == NumericalAwareTokenizer(small.tokenizer, 333, policy=policy).encode(text)
    assert NumericalAwareTokenizer.from_pretrained(tmp_path, num_token_id=350).num_token_id == 350


def test_trained_tokenizer_is_deterministic_and_reads_every_byte(small: NumericalAwareTokenizer) -> None:
    again = train_tokenizer(CORPUS, 320)
    assert again.backend_tokenizer.to_str() == small.tokenizer.backend_tokenizer.to_str()
    assert len(again) <= 320
    assert again.eos_token == again.pad_token == "<|endoftext|>"
    text = "ż\u0007\U0001f600 never seen"
    assert small.decode(*small.encode(text)) == text
    assert len(small.encode("A patient aged ")[0]) < len("A patient aged ")
    with pytest.raises(UserError, match="259 or more"):
        train_tokenizer(CORPUS, 100)


def test_any_fast_tokenizer_keeps_ids_and_values_in_line() -> None:
    words = {"[UNK]": 0, "costs": 1, "dollars": 2, "[END]": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = NumericalAwareTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[END]"), vocab_size=5
    )
    assert tokenizer.encode("costs 5.5 dollars") == ([1, 4, 2], [0.0, 5.5, 0.0])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3


SMALL = NumericalAwareTokenizer(train_tokenizer([f"A patient aged {a}, 价格é {a}元.\n" for a in range(50)], 320))


@settings(max_examples=100)
@given(st.lists(texts | st.text(max_size=20).filter(lambda t: t.isprintable()), max_size=20), policies)
def test_encoding_in_bulk_equals_encoding_one_by_one(some: list[str], policy: NumberPolicy) -> None:
    many = [*some, "", "a \U0010fffe 5", "<NUM> 6", "e\u0301 5\u0338 \u1e9b\u0323"] * 3
    for tokenizer in (
        NumericalAwareTokenizer(SMALL.tokenizer, policy=policy),
        NumericalAwareTokenizer(SMALL.tokenizer, num_token_id=SMALL.text_size + 1, policy=policy),
        DigitTokenizer(SMALL.tokenizer),
    ):
        read = tokenizer.encoder.read([*many, "x" * encoder._LITTLE])[: len(many)]
        assert read == [tokenizer.encoder.read([text])[0] for text in many]


def test_encoding_in_bulk_with_the_real_vocabulary() -> None:
    tokenizer = NumericalAwareTokenizer.from_pretrained(shared_path("tokenizers/qwen2.5"))
    lines = shared_path("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:300]
    lines += ["价格是99.9元", "l'été coûte 5 €\u0301", "\u1112\u1161\u11ab 7", "ﬁ ½ Å 3", "a\u0327\u0301 10"]
    lines += ["I'LL 'S 've\x1c\x1d \v \f a\r\n\r\n b   \n  c", "x <|im_start|> y", "\x00\x7f 5"]
    assert tokenizer.encoder.read(lines) == [tokenizer.encoder.read([line])[0] for line in lines]
