"""Settings for an amount of data, and a config against its data and base."""

import json
import shutil
from pathlib import Path

import pytest

from cqwen_dist.config import Config, DataConfig
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.amount import COUNTED, MOST, Amount, amount_of, cut_apart, never_warm, suited
from cqwen_dist.data.chat import CHATML


@pytest.mark.parametrize(
    ("texts", "tokens", "context", "expected"),  # length, held out, batch, epochs, warm-up
    [
        (1, 9, None, (64, 0.0, 1, 30, 3)),
        (1, 5000, 512, (512, 0.0, 4, 30, 9)),
        (9, 30, None, (64, 0.0, 4, 30, 9)),
        (40, 30, None, (64, 0.1, 4, 12, 10)),
        (150, 100, None, (128, 0.1, 8, 6, 10)),
        (150, 100, 64, (64, 0.1, 16, 6, 10)),
        (1000, 700, 32_768, (1024, 0.064, 32, 4, 12)),
        (MOST, 5000, None, (2048, 0.032, 32, 2, 20)),
    ],
)
def test_settings_suit_the_amount_and_the_base(texts, tokens, context, expected) -> None:
    found = suited(Amount([tokens] * texts, texts < MOST), context)
    assert (found.length, found.held_out, found.batch, found.epochs, found.warmup) == expected
    assert found.warmup < found.steps / 5
    assert found.batch % min(found.batch, 4) == 0


@pytest.mark.parametrize(
    ("texts", "tokens", "held_out"),
    [(7473, 140, 0.032), (7473, 30, 0.1), (20_000, 30, 0.055), (20_000, 5000, 0.004)],  # 240, 748, 1100 and 80 texts
)
def test_of_many_texts_enough_are_held_out_and_not_a_tenth(texts: int, tokens: int, held_out: float) -> None:
    amount = Amount([tokens] * MOST, texts < COUNTED, further=texts - MOST)
    found = suited(amount, None)
    assert found.held_out == held_out
    assert found.steps == pytest.approx(2 * amount.pieces(found.length) * (1 - held_out) / 32, abs=2)


def test_texts_beyond_those_that_are_looked_at_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("tea\n" * (MOST + 3), encoding="utf-8")
    found = amount_of(DataConfig(train=str(path)))
    assert (len(found.lengths), found.texts, found.complete) == (MOST, MOST + 3, True)
    assert found.words().startswith("2,003 texts")


def test_chats_are_counted_as_the_bases_template_writes_them(one_rank: Path, tmp_path: Path) -> None:
    base, path = tmp_path / "base", tmp_path / "chats.jsonl"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(one_rank / "base" / name, base)
    turns = [{"role": "user", "content": "2 kg?"}, {"role": "assistant", "content": "5"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    config = DataConfig(train=str(path), messages_field="messages")
    short = amount_of(config, base)
    assert short.error is None
    (base / "chat_template.jinja").write_text("Be brief and kind. " + CHATML)
    assert amount_of(config, base).lengths[0] > short.lengths[0]


def test_a_base_counts_tokens_and_without_one_bytes_do(one_rank: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "价格是99.9元"}\n{"text": "tea"}\n{"text": null}\n', encoding="utf-8")
    exact, guess = amount_of(DataConfig(train=str(path)), one_rank / "base"), amount_of(DataConfig(train=str(path)))
    assert guess.lengths == [2 + 6, 2 + 1]
    assert exact.lengths[1] <= 2 + 3
    assert not exact.complete
    assert "t.jsonl:3" in str(exact.error), "what cannot be read ends the look and is told"


def test_rows_of_a_table_that_are_cut_are_told_or_refused(one_rank: Path, tmp_path: Path) -> None:
    """A row's target without its columns teaches nothing."""
    long, path = "w " * 60, tmp_path / "t.jsonl"
    data = DataConfig(train=str(path), prompt_template="{a}", text_template="{y}", target_field="y")
    path.write_text(f'{{"a": "w", "y": 1}}\n{{"a": "{long}", "y": 2}}\n', encoding="utf-8")
    found = amount_of(data, one_rank / "base")
    assert [*cut_apart(found, data, 64)] == [
        "1 of 2 rows have more than 64 tokens: their target is cut away from their columns"
    ]
    assert not [*cut_apart(found, data, 512)]
    assert not [*cut_apart(found, data.model_copy(update={"long_texts": "drop"}), 64)]
    path.write_text(f'{{"a": "{long}", "y": 2}}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"t\.jsonl: data\.train: found only rows of more than 64 tokens"):
        [*cut_apart(amount_of(data, one_rank / "base"), data, 64)]
    (told,) = cut_apart(amount_of(data), data, 8)
    assert told.startswith("1 of 1 rows"), "an estimate refuses nothing"
    rows = Amount([3000] * 100, True)
    assert (suited(rows, 32_768, is_table=True).length, suited(rows, 32_768).length) == (4096, 2048)
    assert (suited(rows, 512, is_table=True).length, suited(rows, None, is_table=True).length) == (512, 2048)


def config(**sections: object) -> Config:
    stages = [{"name": "a", "train": ["heads"], "epochs": 2, "warmup_steps": 9}]
    return Config.model_validate({"model": {"name_or_path": "x"}, "data": {"train": "t"}, "stages": stages, **sections})


def test_stages_that_are_all_warm_up_are_named() -> None:
    few, many = Amount([9] * 128, True), Amount([9] * 256, True)
    (line,) = never_warm(few, config())
    assert line.startswith("stage a has about 8 steps, all of them warm-up: stages.0.warmup_steps is 9")
    assert [*never_warm(many, config()), *never_warm(few._replace(complete=False), config())] == []


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("data.sequence_length=65", 2, "data.sequence_length: found 65, allowed: at most 64, the base's context"),
        ("stages.1.sequence_length=80", 2, "stages.1.sequence_length: found 80, allowed: at most 64"),
        ("stages.0.warmup_steps=300", 0, "note: stage heads has about 3 steps, all of them warm-up"),
        ("data.train=nowhere.jsonl", 0, "note: data.train: no file nowhere.jsonl here, so the data is not checked"),
        ("data.text_field=body", 2, "missing field"),
        ("model.name_or_path=org/model", 0, "note: model.name_or_path: org/model is no folder here"),
    ],
)
def test_validate_checks_against_the_data_and_the_base(cqwen, one_rank, override, code, said) -> None:
    base = [
        "model.architecture=null",
        "model.pretrain=null",
        "model.tokenizer=null",
        f"model.name_or_path={one_rank}/base",
    ]
    done = cqwen("config", "validate", one_rank / "config.yaml", *base, override)
    assert (done.returncode, said in " ".join(done.stderr.split())) == (code, True), done.stderr
