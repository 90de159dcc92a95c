"""What of a record is learnt: prompts, chats, tables; and where records come from."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.config.errors import BadLine
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.collate import collate
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts, read_train
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


def _data(path: Path, records: list[dict[str, Any]], tokenizer: NumericalAwareTokenizer, **config: Any) -> TextDataset:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return load_datasets(DataConfig(train=str(path), **config), tokenizer).train


def _learnt(dataset: TextDataset, index: int, tokenizer: NumericalAwareTokenizer) -> tuple[str, list[float]]:
    """The text of the labels of a sample, and the values that the regression learns."""
    batch = collate([dataset[index]], pad_token_id=0, num_token_id=tokenizer.num_token_id)
    keep = batch.labels[0] != IGNORE_INDEX
    assert not batch.numeric_mask[0][~keep].any()
    assert (batch.numeric_labels[0][~keep] == 0).all()
    words = tokenizer.decode(batch.labels[0][keep], batch.numeric_labels[0][keep])
    return words, batch.numeric_labels[0][batch.numeric_mask[0]].tolist()


def test_a_prompt_has_no_labels(tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    records = [{"question": "How old, 5 or 6?", "answer": "She is 7."}, {"question": "", "answer": "8 it is"}]
    dataset = _data(
        tmp_path / "a.jsonl",
        records,
        tokenizer,
        prompt_template="{question}\\n",
        text_field="answer",
        sequence_length=64,
    )
    assert _learnt(dataset, 0, tokenizer) == ("She is 7.<|endoftext|>", [7.0])
    # What is learnt begins as it does when the prompt alone was read, as at generation.
    prompt = tokenizer.encode("How old, 5 or 6?\n")[0]
    assert dataset[0][0].ids[: len(prompt)].tolist() == prompt
    assert dataset[0][0].learnt is not None
    assert dataset[0][0].learnt.tolist() == [False] * len(prompt) + [True] * (len(dataset[0][0].ids) - len(prompt))
    assert _learnt(dataset, 1, tokenizer) == ("8 it is<|endoftext|>", [8.0])
    assert dataset.report.targets == 2
    last = _data(
        tmp_path / "b.jsonl",
        [{"q": "9", "text": "no number"}],
        tokenizer,
        prompt_template="a {q} ",
        numeric_targets="last",
    )
    assert _learnt(last, 0, tokenizer) == ("no number<|endoftext|>", [])


def test_cut_pieces_of_a_prompt_have_no_labels(tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    record = {"q": " ".join(f"old {i}" for i in range(20)), "text": " ".join(f"aged {i}" for i in range(20))}
    whole = _data(tmp_path / "a.jsonl", [record], tokenizer, prompt_template="{q} ", sequence_length=500)
    for length in (2, 5, 17, 64):
        cut = whole.with_length(length)
        texts = [_learnt(cut, i, tokenizer) for i in range(len(cut))]
        assert [v for _, values in texts for v in values] == [float(i) for i in range(20)]
        labels = [
            int(i)
            for k in range(len(cut))
            for i in collate([cut[k]], pad_token_id=0, num_token_id=tokenizer.num_token_id).labels.flatten()
        ]
        assert tokenizer.eos_token_id in labels
        batch = collate([whole[0]], pad_token_id=0, num_token_id=tokenizer.num_token_id)
        assert [i for i in labels if i != IGNORE_INDEX] == batch.labels[batch.labels != IGNORE_INDEX].tolist()


QWEN = (  # the heart of Qwen2.5's template: a system prompt of its own
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
CHAT = [
    {"role": "user", "content": "What is 2 and 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": " 9 \n"},
]


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (None, ["It is 5.<|im_end|>", " 9 \n<|im_end|>"]),  # from the prompt of a generation on
        (QWEN, ["It is 5.<|im_end|>", "9 \n<|im_end|>"]),
        (TRIMMING, ["It is 5.", "9"]),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_assistants_turns_alone_are_learnt(template, learnt, tmp_path, tokenizer) -> None:
    inner = train_tokenizer(diabetes_texts("train"), 400)
    inner.chat_template = template
    chat = Chat(inner)
    if learnt is None:
        with pytest.raises((UserError, BadLine)):
            chat(CHAT)
        return
    text, spans, _ = chat(CHAT)
    assert [text[start:end] for start, end in spans] == learnt
    assert "What is 2 and 3?" in text
    own = NumericalAwareTokenizer(inner)
    dataset = _data(tmp_path / "a.jsonl", [{"messages": CHAT}], own, messages_field="messages")
    words, values = _learnt(dataset, 0, own)
    assert values == [5.0, 9.0]
    assert words.replace("5e0.9", "5.9") == "".join(learnt)  # in a row, "5" "." "9" would be one number
    assert own.eos_token_id not in collate([dataset[0]], pad_token_id=0, num_token_id=own.num_token_id).labels


@pytest.mark.parametrize(
    "messages",
    [None, [], "text", [{"role": "user"}], [{"role": "user", "content": "a"}], [{"role": 1, "content": "a"}]],
)
def test_bad_chats_are_bad_lines(messages: Any, tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:1: no chat: "):
        _data(tmp_path / "a.jsonl", [{"m": messages}], tokenizer, messages_field="m")


def test_table_row_becomes_sentence_with_one_target_column(tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    path = tmp_path / "patients.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["age", "name", "y"], ["59", "Ann, 2nd", "151.0"], ["48", "Bo", "-7.25"]])
    config = DataConfig(
        train=str(path), text_template="A patient aged {age}, {name}, progression {y} in 5 years.", target_field="y"
    )
    dataset = load_datasets(config, tokenizer).train
    assert [_learnt(dataset, i, tokenizer)[1] for i in range(2)] == [[151.0], [-7.25]]
    assert dataset[0][0].values[dataset[0][0].values != 0].tolist() == [59.0, 2.0, 151.0, 5.0]
    assert dataset.statistics().median == (151.0 - 7.25) / 2
    for key, text in (("target_field", "z"), ("target_field", "age")):
        with pytest.raises(ValueError):
            DataConfig(train="a", text_template="{age} {age} {y}", **{key: text})


def _table(folder: Path) -> dict[str, str]:
    rows = [{"text": f"row {i} of é", "x": i + 0.1} for i in range(5)]
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "c.parquet", row_group_size=2)
    for name, delimiter in (("d.csv", ","), ("e.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["text", "x"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(folder / "splits"))
    (folder / "files").mkdir()
    (folder / "files" / "train.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    names = ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.csv", "e.tsv", "saved", "splits", "splits#train", "files"]
    return {**{name: str(folder / name) for name in names}, "hf": f"hf:{folder / 'files'}#train"}


def test_every_kind_of_source_gives_the_same_texts(tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    sources = _table(tmp_path)
    expected = [f"row {i} of é: {i + 0.1!r}" for i in range(5)]
    for name, source in sources.items():
        config = DataConfig(train=source, text_template="{text}: {x}", cache_dir=str(tmp_path / "cache"))
        assert [t.text for t in read_texts(source, config, ReadReport())] == expected, name
        assert load_datasets(config, tokenizer).train.report.numbers == 10
    only = DataConfig(train=f"{tmp_path / 'splits'}#test", text_field="text")
    assert len(list(read_texts(str(only.train), only, ReadReport()))) == 1
    for wrong, told in (
        (f"{tmp_path / 'splits'}#dev", "one of train, test"),
        ("hf:no/such", "what `datasets` can load"),
    ):
        with pytest.raises(UserError, match=rf"data\.train: found .*{told}"):
            list(read_texts(wrong, only, ReadReport()))
    missing = DataConfig(train=sources["c.parquet"], text_field="body")
    with pytest.raises(UserError, match=r"c\.parquet: missing field: found \['text', 'x'\]"):
        list(read_texts(str(missing.train), missing, ReadReport()))


def test_a_column_without_a_name_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",text,y,\n0,one,1,\n1,two,2,\n")  # pandas' index, and a comma too many
    (tmp_path / "b.jsonl").write_text('{"": 0, "text": "one", "y": 1}\n{"": 1, "text": "two", "y": 2}\n')
    for name in ("a.csv", "b.jsonl"):
        source = str(tmp_path / name)
        for template, expected in (
            ("{text} {y}", ["one 1", "two 2"]),
            ("{*}", ["text: one\ny: 1\n", "text: two\ny: 2\n"]),
        ):
            found = read_texts(source, DataConfig(train=source, text_template=template), ReadReport())
            assert [text.text for text in found] == expected


def test_text_files_are_read_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\nthree\r\nfour", newline="")
    found = read_texts(str(path), DataConfig(train=str(path)), ReadReport())
    lines = [(text.text, text.where.rsplit(":", 1)[1]) for text in found]
    assert lines == [("one", "1"), ("two", "2"), ("three", "5"), ("four", "6")]


def test_sources_follow_each_other_and_one_named_twice_counts_twice(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(2)))
    files = [str(tmp_path / f"{name}.jsonl") for name in "abb"]
    for limit, expected in ((None, ["a0", "a1", "b0", "b1", "b0", "b1"]), (3, ["a0", "a1", "b0"])):
        report = ReadReport()
        data = DataConfig(train=files, limit=limit)
        assert [text.text for text in read_train(data, report)] == expected
        assert report.read == len(expected)
