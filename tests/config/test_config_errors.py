"""Each way to get a config wrong gives one line: where, key, found, allowed."""

from pathlib import Path

import pytest
import yaml

from cqwen_dist.config import Config, Ramp, UserError, changed_keys, load_config

MODEL = "model: {name_or_path: x}\n"
BASE = MODEL + "data: {train: a}\n"


@pytest.fixture
def line(tmp_path):
    """The error line of a text (and overrides), the file's path taken off."""

    def of(text: str | bytes, *overrides: str) -> str:
        path = tmp_path / "c.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(UserError) as caught:
            load_config(path, overrides)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        return message.replace(str(path), "FILE")

    return of


UNKNOWN = [
    ("data.trian=1", "data.trian", "; did you mean train? (known keys: train, eval,"),
    ("stages.0.stepz=1", "stages.0.stepz", "; did you mean steps? (known keys: name,"),
    ("loss.lambda=1", "loss.lambda", "; did you mean loss.reg_weight? (known keys: gate,"),
    ("stages.0.lambda=1", "stages.0.lambda", "; did you mean stages.0.reg_weight? (known keys: name,"),
    ("model.C_k=1", "model.C_k", "; did you mean start? (known keys: name_or_path,"),
    ("w_k=[1]", "w_k", "; did you mean loss.class_weights? (known keys: model,"),
    ("w_num=1", "w_num", "; did you mean start? (known keys: model,"),
]


def test_an_unknown_key_shows_the_fields_of_its_own_section(line):
    for override, key, hint in UNKNOWN:
        assert line(BASE, override).startswith(f"override {override}: {key}: unknown key{hint}")


def test_errors_in_an_overridden_list_point_to_the_override(line):
    text = BASE + "stages:\n  - {name: a, train: [heads], steps: 1}\n"
    assert line(text, "stages.0.train=[head]").startswith(
        "override stages.0.train=[head]: stages.0.train.0: found 'head'"
    )


WRONG = [
    (MODEL, "FILE: data: found no value, allowed: a section with train, eval"),
    (MODEL + "data: {}", "FILE, line 2: data.train: found no value, allowed: a value (this key is required)"),
    (MODEL + "data:\n  train: 3", "FILE, line 3: data.train: found 3, allowed: text (put it in quotes) or a list"),
    (
        "model: {architecture: {model_type: qwen2, max_position_embeddings: 64}}\n"
        "data: {train: a, sequence_length: 65}",
        "FILE, line 2: data.sequence_length: found 65, allowed: at most 64, the base's context",
    ),
    ("model: {}\ndata: {train: a}", "FILE, line 1: model.name_or_path/architecture: found neither, allowed: exactly"),
    ("", "FILE: config: found no content, allowed: a mapping with model, data"),
    ("model:\n\tname_or_path: x", "FILE, line 2: config: found a tab, allowed: spaces"),
    ("model:\n  lora:\n    r: 1\n    r: 1", "FILE, line 4: model.lora.r: found it in lines 3 and 4, allowed: each key"),
    ("a: &x 1\nb: *x", "FILE, line 1: config: found the anchor x, allowed: values written out"),
    ("a: !!python/name:os.system", "FILE, line 1: config: found could not determine a constructor"),
    (b"model: 1\ndata: \xff\n", "FILE, line 2: config: found byte 0xff, allowed: UTF-8 text"),
]


def test_an_error_in_a_file_names_line_key_found_and_allowed(line):
    for text, start in WRONG:
        assert line(text).startswith(start)


VALUES = [
    ("train.global_batch_size=3", "global_batch_size: found 3, allowed: a multiple of train.micro_batch_size (8)"),
    ("stages.0.lr=.nan", "stages.0.lr: found nan, allowed: a finite number"),
    ("stages.0.lr=fast", "stages.0.lr: found 'fast', allowed: a number"),
    ("stages.0.steps=2.5", "stages.0.steps: found 2.5, allowed: a whole number"),
    ("start=calibrate", "start: found 'calibrate', allowed: 'calibrated', 'seed' or 'seed-100'"),
    ("parallel.zero_stage=4", "parallel.zero_stage: found 4, allowed: 1, 2 or 3"),
    ("data.text_template={a", "data.text_template: found '{a', allowed: a format with {field}s"),
    ("data.watch={a: {source: b}}", "data.watch.a: found a mapping, allowed: text"),
    ("data.numbers=some", "data.numbers: found 'some', allowed: 'plain', 'accounting' or 'all'"),
    ("model.architecture={model_type: qwen2}", "model.name_or_path/architecture: found both, allowed: exactly one"),
    ("stages.9.steps=1", "stages: found index 9, allowed: an index from 0 to 1"),
    ("train.precision=fp16", "train.precision: found 'fp16', allowed: fp32 or bf16 "),
    ("a..b=1", "found 'a..b=1', allowed: key=value, for instance stages.0.steps=3"),
]  # fmt: skip


def test_a_wrong_value_names_key_found_and_allowed(line):
    for override, rest in VALUES:
        assert rest in line(BASE, override)


def test_an_error_names_the_override_or_line_that_caused_it(line):
    both = "stages.0.steps: found both steps and epochs, allowed: exactly one of steps, epochs and until"
    assert line(BASE, "stages.0.epochs=1").startswith(f"override stages.0.epochs=1: {both}")
    assert line(BASE, "train.seed=1.5", "run.name=a").startswith("override train.seed=1.5: train.seed: ")
    neither = "FILE, line 3: stages.0.steps: found neither steps nor epochs"
    assert line(BASE + "stages: [{name: a, train: [lora]}]", "run.name=a").startswith(neither)
    assert len(line(BASE, "start=" + "a" * 200)) < 320
    twice = line(BASE, "data.eval=b", "data.eval_fraction=0.1")
    assert "data.eval_fraction: found 0.1, allowed: 0, as data.eval is given" in twice


@pytest.mark.parametrize(
    ("architecture", "key", "found"),
    [
        ("{model_type: gpt2}", "model_type", "'gpt2'"),
        ("{hidden_size: 8}", "model_type", "no value"),
        ("{model_type: qwen2, rope: {a: [.nan]}}", "rope.a.0", "nan"),
    ],
)
def test_refuses_architectures_that_are_not_finite(line, architecture, key, found):
    text = f"model: {{architecture: {architecture}}}\ndata: {{train: a}}"
    assert f"model.architecture.{key}: found {found}, allowed: " in line(text)


def test_a_message_is_one_printable_line():
    message = str(UserError("a\nb", "x\ty\x07", "c\r\nd", "e\udcff"))
    assert message.isprintable()
    assert str(UserError("k", "x" * 500, "short")).count("x") < 120


TREE = {
    "model": {"name_or_path": "/base"},
    "data": {"train": "a.jsonl", "eval_fraction": 0.1},
    "loss": {"constraint": {"mode": False}},  # what YAML makes of a bare off
    "stages": [
        {"name": "a", "train": ["heads"], "until": {"max_steps": 10}, "reg_weight": {"start": 0, "end": 1}},
        {"name": "b", "train": ["lora"], "steps": 3},
    ],
}


def load(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return load_config(path, overrides)


def test_training_sections_keep_the_given_values(tmp_path: Path) -> None:
    config = load(tmp_path, "loss.class_weights=frequency", "model.wide=[64, 16]")
    assert config.loss.constraint.mode == "off"
    assert config.model.wide_size == (64, 16, 0)
    assert isinstance(config.stages[0].reg_weight, Ramp)
    assert config.stages[0].until is not None
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["stages.0.steps=3"], "stages.0.steps", "both steps and until"),
        (["data.eval_fraction=0.0"], "stages.0.until", "data.eval or data.eval_fraction"),
        (["stages.1.micro_batch_size=5"], "stages.1.micro_batch_size", r"global_batch_size \(32\)"),
        (["model.lora.dora=true", "parallel.zero_stage=3"], "model.lora.dora", "parallel.zero_stage 3"),
        (["model.wide=[64, 0, 2]", "parallel.zero_stage=3"], "model.wide", "two numbers under parallel.zero_stage 3"),
        (
            ["model.wide=[64, 0, 2]", "model.compile_layers=true"],
            "model.compile_layers",
            "states read between the layers",
        ),
        (["model.wide=64", "start=seed"], "model.wide", "start calibrated"),
    ],
)
def test_wrong_training_settings_are_refused_by_key(tmp_path: Path, overrides: list[str], key: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        load(tmp_path, *overrides)
    assert refusal.value.key == key


def test_a_resumed_run_may_change_only_resumable_keys(tmp_path: Path) -> None:
    old = load(tmp_path)
    how = load(tmp_path, "stages.1.micro_batch_size=4", "train.feature_cache.mode=never")
    assert changed_keys(old, how) == []
    what = load(tmp_path, "stages.1.global_batch_size=16", "loss.constraint.eps=0.5")
    assert {key for key, _, _ in changed_keys(old, what)} == {"stages.1.global_batch_size", "loss.constraint.eps"}
