"""The base tokenizer's own conventions: what begins and ends a text, and whose row <NUM> may take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from cqwen_dist.cli.prepared import around
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer

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
