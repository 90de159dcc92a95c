"""CausalQwenTokenizer as libraries touch tokenizers: padding, collators, chats, special tokens, decoding."""

import copy
import pickle
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from support.exported import TEXTS
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from cqwen_dist.config import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer

BIG = 1234567.890123  # fp32 does not hold it
ROWS = [f"he paid {BIG}", "tea"]


@pytest.fixture
def tokenizer() -> CausalQwenTokenizer:
    return CausalQwenTokenizer.of(NumericalAwareTokenizer(train_tokenizer(TEXTS, 270), vocab_size=300))


@pytest.mark.parametrize("side", ["left", "right"])
def test_it_can_be_called_as_transformers_tokenizers(tokenizer: CausalQwenTokenizer, side: str) -> None:
    lists = [tokenizer.reader.encode(text) for text in ROWS]
    one = tokenizer(ROWS[0])
    assert (one["input_ids"], one["numeric_values"]) == lists[0]
    assert tokenizer(ROWS)["input_ids"] == [ids for ids, _ in lists]
    with pytest.raises(ValueError, match="padding"):
        tokenizer(ROWS, return_tensors="pt")
    tokenizer.padding_side = side
    for batch in (
        tokenizer(ROWS, padding=True, return_tensors="pt"),
        tokenizer.pad([tokenizer(text) for text in ROWS], return_tensors="pt"),
        tokenizer.pad([{k: torch.tensor(v, dtype=torch.float64 if k == "numeric_values" else None)
                        for k, v in tokenizer(text).items()} for text in ROWS]),
    ):  # fmt: skip
        wanted = tokenizer.preprocess(ROWS, side)
        assert set(batch) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(batch[name], tensor), name
        assert batch["numeric_values"].dtype == torch.float64
    assert BIG in tokenizer(ROWS, padding="max_length", max_length=50, return_tensors="np")["numeric_values"][0]
    assert len(tokenizer(ROWS, padding="max_length", max_length=50)["numeric_values"][1]) == 50


def test_truncation_keeps_ids_and_values_together(tokenizer: CausalQwenTokenizer) -> None:
    ids, values = tokenizer.reader.encode(ROWS[0])
    cut = tokenizer(ROWS[0], truncation=True, max_length=2)
    assert (cut["input_ids"], cut["numeric_values"]) == (ids[:2], values[:2])
    tokenizer.truncation_side = "left"
    cut = tokenizer(ROWS[0], truncation=True, max_length=2)
    assert (cut["input_ids"], cut["numeric_values"]) == (ids[-2:], values[-2:])
    assert BIG in cut["numeric_values"]
    assert tokenizer(ROWS[0], truncation=True)["input_ids"] == ids


def test_transformers_collators_keep_the_values(tokenizer: CausalQwenTokenizer) -> None:
    rows = [dict(tokenizer(text)) for text in ROWS]
    wanted = tokenizer.preprocess(ROWS, "left")
    labelled = [{**row, "labels": row["input_ids"]} for row in rows]
    for found in (
        DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows),
        DataCollatorForSeq2Seq(tokenizer)(labelled),
        DataCollatorWithPadding(tokenizer)(rows),
    ):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        if "labels" in found:
            assert torch.equal(found["labels"] == -100, wanted["attention_mask"] == 0)


def test_other_attributes_are_those_of_the_wrapped_tokenizer(tokenizer: CausalQwenTokenizer) -> None:
    end = "<|endoftext|>"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (end, end, None)
    assert tokenizer.is_fast
    assert tokenizer.vocab_size == tokenizer.num_token_id == len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids(end) == tokenizer.eos_token_id
    tokenizer.pad_token = "<|im_end|>"
    assert tokenizer.pad_token_id == tokenizer.tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer(ROWS, padding=True)["input_ids"][1][0] == tokenizer.pad_token_id
    tokenizer.pad_token_id = tokenizer.eos_token_id
    assert tokenizer.tokenizer.pad_token == end
    tokenizer.tokenizer.pad_token = tokenizer.pad_token = None
    assert CausalQwenTokenizer.of(tokenizer.reader).pad_token == end, "the end token, where there is none to pad with"
    with pytest.raises(AttributeError):
        _ = tokenizer.no_such_thing
    for again in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert again(ROWS).data == tokenizer(ROWS).data


def test_it_is_a_pretrained_tokenizer_fast(tokenizer: CausalQwenTokenizer) -> None:
    """What TRL (PreTrainedTokenizerBase) and lm-eval (PreTrainedTokenizerFast) test for, and what they then call."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    text = "tea costs 3.5"
    ids, values = tokenizer.reader.encode(text)
    assert tokenizer.encode(text) == ids, "ids alone, as everywhere in transformers"
    tokens = tokenizer.tokenize(text)
    assert tokens[-1] == tokenizer.convert_ids_to_tokens(tokenizer.num_token_id) == "<NUM>"
    assert tokenizer.convert_tokens_to_ids(tokens) == ids
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    pair = tokenizer("tea costs ", "3.5")
    assert (pair["input_ids"], pair["numeric_values"]) == (ids, values)
    assert tokenizer([["tea", " costs ", "3.5"]], is_split_into_words=True)["input_ids"] == [ids]
    assert tokenizer(text=text, text_target=text)["labels"] == ids
    assert "numeric_values" not in tokenizer.tokenizer(text)
    spelt = tokenizer("he paid 1,234.5 and 7 e", return_offsets_mapping=True)
    assert ["he paid 1,234.5 and 7 e"[a:b] for a, b in spelt["offset_mapping"]][-3:] == ["7", " ", "e"]
    assert spelt.char_to_token(10) == spelt["numeric_values"].index(1234.5)
    cut = tokenizer(text, "pay 7 e", truncation=True, max_length=9, stride=1, return_overflowing_tokens=True)
    kept = [sum(values) for values in cut["numeric_values"]]
    assert len(kept) > 1, "each number stays with its token"
    for row, values in zip(cut["input_ids"], cut["numeric_values"], strict=True):
        assert [token == tokenizer.num_token_id for token in row] == [value != 0.0 for value in values]
    assert pair.sequence_ids() == [0] * (len(ids) - 1) + [1]
    with pytest.raises(ValueError, match="text input must be of type"):
        tokenizer([3.5])


def test_it_encodes_text_as_training_does(tokenizer: CausalQwenTokenizer) -> None:
    pieces = ["1", "2.5", "1,234.50", " ", "\n", "tea", "e\u0301", "价格", "<NUM>", "<|im_end|>", *"-$.(", "１２"]
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        read = tokenizer(text, return_offsets_mapping=True)
        assert (read["input_ids"], read["numeric_values"]) == tokenizer.reader.encode(text), text
        text, words = unicodedata.normalize("NFC", text), read.word_ids()
        assert words == sorted(words)
        for token, row, (start, end) in zip(read.tokens(), read["input_ids"], read["offset_mapping"], strict=True):
            assert row != tokenizer.num_token_id or text[start:end] == token
        assert not text or read["offset_mapping"][-1][1] == len(text)


def test_read_numbers_false_keeps_numerals_as_words(tokenizer: CausalQwenTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    plain = CausalQwenTokenizer.from_pretrained(tmp_path, read_numbers=False)
    found = plain(ROWS[0])
    assert found["input_ids"] == tokenizer.tokenizer(ROWS[0])["input_ids"]
    assert not any(found["numeric_values"])
    assert plain.decode(found["input_ids"]) == ROWS[0], "nothing is lost"
    assert CausalQwenTokenizer.from_pretrained(tmp_path)(ROWS[0]).data == tokenizer(ROWS[0]).data


def test_tokens_cannot_be_added_over_the_row_of_num(tokenizer: CausalQwenTokenizer) -> None:
    for add in (lambda: tokenizer.add_tokens("<new>"), lambda: tokenizer.add_special_tokens({"pad_token": "<pad>"})):
        with pytest.raises(UserError, match=r"add_tokens: found '<(new|pad)>'.*<NUM>"):
            add()
    assert tokenizer.add_special_tokens({"pad_token": "<|im_end|>"}) == 0
    assert tokenizer.pad_token == "<|im_end|>"


def test_decoding_without_values_shows_num(tokenizer: CausalQwenTokenizer) -> None:
    text = "he paid 12.5 for the tea<|endoftext|>"
    ids, values = tokenizer.reader.encode(text)
    assert tokenizer.decode(ids, values) == text
    assert tokenizer.decode(ids) == text.replace("12.5", "<NUM>")
    assert tokenizer.decode(torch.tensor(ids), skip_special_tokens=True) == "he paid <NUM> for the tea"
    assert tokenizer.batch_decode([ids, ids[:1]], [values, values[:1]], skip_special_tokens=True)[0] == text[:-13]
    assert tokenizer.decode([ids], [values]) == [text]
    cut = [torch.tensor(ids)[2:], torch.tensor(ids[:1])]  # as usual code cuts prompts off: a list of tensors
    assert tokenizer.batch_decode(cut, [torch.tensor(values)[2:], np.zeros(1)]) == tokenizer.batch_decode(
        [ids[2:], ids[:1]], [values[2:], [0.0]]
    )
    assert tokenizer.decode(list(torch.tensor(ids)), values) == text
    assert tokenizer.decode(torch.tensor(tokenizer.num_token_id), torch.tensor(2.5)) == "2.5"
    assert tokenizer.decode([]) == ""


def test_chat_templates_keep_numbers(tokenizer: CausalQwenTokenizer) -> None:
    chat = [{"role": "user", "content": "tea costs 3.5"}]
    text = "<|im_start|>user\ntea costs 3.5<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == text
    found = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    assert torch.equal(found["numeric_values"], tokenizer.preprocess([text])["numeric_values"])
    assert 3.5 in found["numeric_values"]
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert tokenizer.apply_chat_template(chat, return_dict=False) == tokenizer.reader.encode("tea costs 3.5!")[0]
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages[0]['content'] }}"
    asked = Chat(tokenizer.tokenizer).prompt(chat, "messages")
    assert tokenizer.apply_chat_template(chat, tokenize=False) == asked == "26 Jul 2024 tea costs 3.5"
