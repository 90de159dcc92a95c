"""CausalQwenTokenizer as libraries touch tokenizers: padding, collators, chats, special tokens, decoding."""

import copy
import json
import pickle
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exported import TEXTS
from tokenizers import AddedToken, processors
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from cqwen_dist.cli.prepared import around
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
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


CORPUS = [f"A patient aged {a} weighs {a * 1.5} kg, tea costs {a}.\n" for a in range(20, 60)]
TURNS = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "we ask"}, {"role": "assistant", "content": "ok tea"}]


def small(before: str = "", after: str = "", template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A tiny tokenizer with special tokens <s>, </s> and <end>, and a post-processor that writes some around a text."""
    tokenizer = train_tokenizer(CORPUS, 300)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<end>", **special})
    around = [(name, tokenizer.convert_tokens_to_ids(name)) for name in {*before.split(), *after.split()}]
    if around:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            f"{before} $A {after}".strip(), f"{before} $A $B {after}".strip(), around
        )
    tokenizer.chat_template = template
    return tokenizer


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "like Llama 3": lambda: small("<s>", template="{{ bos_token }}" + TURNS),
    "like Mistral": lambda: small(
        "<s>",
        template="{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + "
        "' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}",
    ),
    "with add_eos_token": lambda: small("<s>", "</s>", template="{{ bos_token }}" + TURNS),
    "a template that writes no BOS": lambda: small("<s>", template=TURNS),
    "a template with a line after EOS": lambda: small(template=TURNS.replace("eos_token }}", "eos_token + '\n' }}")),
    "another end than EOS": lambda: small(after="<end>", template=TURNS),
    "two tokens before a text": lambda: small("<end> <s>", template=TURNS),
    "like Qwen": lambda: small(template=TURNS.replace("eos_token", "'<|im_end|>\n'")),
}


def trained_ids(tokenizer: NumericalAwareTokenizer, folder: Path, record: dict[str, Any], **keys: Any) -> list[int]:
    path = folder / "texts.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    config = DataConfig(train=str(path), **keys)
    texts = list(read_texts(config.train, config, ReadReport(), chat=Chat(tokenizer.tokenizer)))
    return tokenise(texts, tokenizer, config)[0][0].ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_begins_and_ends_as_the_base_tokenizer_has_it(kind: str, tmp_path: Path) -> None:
    base = KINDS[kind]()
    tokenizer = NumericalAwareTokenizer(base)
    own = base("tea kg")["input_ids"]
    end = own[-1] if own[-1] in base.all_special_ids else base.eos_token_id
    own = own if own[-1] == end else [*own, end]
    assert trained_ids(tokenizer, tmp_path, {"text": "tea kg"}) == own
    assert trained_ids(tokenizer, tmp_path, {"text": base.decode(own)}) == own, "what is there is not written again"
    assert tokenizer.eos_token_id == end
    assert tokenizer.encode("tea kg").ids == own[:-1], "generation and prediction read a prompt in the same way"
    assert tokenizer.encode("tea kg", begin=False).ids == base("tea kg", add_special_tokens=False)["input_ids"]
    # The exported tokenizer, with and without transformers' additions.
    CausalQwenTokenizer.of(tokenizer).save_pretrained(tmp_path / "export")
    served = CausalQwenTokenizer.from_pretrained(tmp_path / "export")
    assert served("tea kg")["input_ids"] == own[:-1]
    assert served(base.decode(own[:-1]))["input_ids"] == own[:-1]
    assert served(["tea kg", "tea"], padding=True)["input_ids"][0] == own[:-1]
    assert len(served("tea kg kg kg", truncation=True, max_length=4)["input_ids"]) == 4
    assert served("tea kg", add_special_tokens=False)["input_ids"] == tokenizer.encode("tea kg", begin=False).ids
    assert served.reader.digest() == tokenizer.digest()
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    assert plain("tea kg")["input_ids"] == base("tea kg")["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_begins_as_its_template_writes_it_and_ends_once(kind: str, tmp_path: Path) -> None:
    base = KINDS[kind]()
    tokenizer = NumericalAwareTokenizer(base)
    own = base.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    ids = trained_ids(tokenizer, tmp_path, {"messages": CHAT}, messages_field="messages")
    ended = base.decode(own).rstrip().endswith(base.decode([tokenizer.eos_token_id]))
    assert ids == (own if ended else [*own, tokenizer.eos_token_id])
    served = CausalQwenTokenizer.of(tokenizer)
    assert served.apply_chat_template(CHAT, tokenize=True, return_dict=False) == own


def test_prepare_shows_the_tokens_around_a_text() -> None:
    llama, qwen = (NumericalAwareTokenizer(KINDS[f"like {name}"]()) for name in ("Llama 3", "Qwen"))
    assert around(llama, chats=False) == "a text begins with <s> and ends with </s>"
    assert around(llama, chats=True) == "a text begins as the chat template writes it and ends with </s>"
    assert around(qwen, chats=False) == "a text begins without a token of the tokenizer's own and ends with </s>"


def test_numbers_keep_their_values_behind_the_first_token() -> None:
    tokenizer = NumericalAwareTokenizer(KINDS["like Llama 3"]())
    served = CausalQwenTokenizer.of(tokenizer)
    ids, values = tokenizer.encode("5 kg")
    assert (ids[1], values[:3]) == (tokenizer.num_token_id, [0.0, 5.0, 0.0])
    read = served("5 kg")
    assert (read["input_ids"], read["numeric_values"]) == (ids, values)
    assert tokenizer.encode(tokenizer.decode(ids, values)) == (ids, values)
    assert served("5 kg", "6 kg")["numeric_values"] == [0.0, 5.0, 0.0, 6.0, 0.0]


def saved(folder: Path, *added: str, special: bool = False) -> tuple[PreTrainedTokenizerFast, int]:
    """A base's folder that a run wrote: its <NUM> row was the first without a word. Then tokens were added."""
    base = small()
    tokenizer = NumericalAwareTokenizer(base)
    tokenizer.write_policy(folder)
    base.add_tokens([AddedToken(name, special=special) for name in added])
    base.save_pretrained(folder)
    return base, tokenizer.num_token_id


@pytest.mark.parametrize("special", [False, True])
def test_num_never_takes_the_row_of_a_token_that_was_added(tmp_path: Path, special: bool) -> None:
    base, row = saved(tmp_path, "<foo>", "<bar>", special=special)
    assert base.convert_tokens_to_ids("<foo>") == row
    said = rf"row {row} for <NUM>, which is the token <foo> now, allowed: .*model.num_token_id: {row + 2}"
    for load in (NumericalAwareTokenizer.from_pretrained, CausalQwenTokenizer.from_pretrained):
        with pytest.raises(UserError, match=said):
            load(tmp_path)
    moved = NumericalAwareTokenizer.from_pretrained(tmp_path, num_token_id=row + 2)
    assert moved.encode("<foo>5").ids == [row, row + 2]


def test_num_may_have_a_token_of_its_own(tmp_path: Path) -> None:
    base = small()
    base.add_tokens([AddedToken("<reserved>", special=True)])
    row = base.convert_tokens_to_ids("<reserved>")
    NumericalAwareTokenizer(base, row).save_pretrained(tmp_path)
    assert NumericalAwareTokenizer.from_pretrained(tmp_path).num_token_id == row
