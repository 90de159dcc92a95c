"""What a config file and its overrides mean; no input, however odd, ends in anything but a Config or a UserError."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cqwen_dist.config import Config, UserError, changed_keys, json_schema, load_config, yaml_text
from cqwen_dist.config.messages import _places

ROOT = Path(__file__).parents[2]
GENERATED = ("config.md", "capabilities.md", "changelog.md", "conformance.md")  # by `make docs`
BASE = "model: {name_or_path: x}\ndata: {train: a}\n"


@pytest.fixture
def load(tmp_path):
    def of(text: str, *overrides: str) -> Config:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return of


def test_overrides_set_defaults_list_items_and_optional_sections(load):
    config = load(BASE, "stages.0.steps=3", "model.lora.target_modules.0=up_proj", "stages.1.lr_groups.scales=1e-2")
    assert (config.stages[0].steps, config.stages[1].steps) == (3, 1000)
    assert config.model.lora.target_modules[:2] == ["up_proj", "k_proj"]
    assert config.stages[1].lr_groups["scales"] == 0.01
    built = "model: {architecture: {model_type: qwen2}}\ndata: {train: a}"
    assert load(built, "model.pretrain.steps=3").model.pretrain.steps == 3  # type: ignore[union-attr]
    assert load(built, "model.architecture.rope_theta=1e6").model.architecture == {
        "model_type": "qwen2",
        "rope_theta": 1e6,
    }


def test_an_override_of_text_needs_no_quotes(load):
    assert load(BASE, "run.name=007").run.name == "007"
    assert load(BASE, "run.name=null").run.name is None
    assert load(BASE, "run.name='null'").run.name == "null"
    assert load(BASE, "data.text_template={question}").data.text_template == "{question}"
    assert load(BASE, "data.text_template={q}: {a}").data.text_template == "{q}: {a}"
    assert load(BASE, "data.train=[a, b]").data.train == ["a", "b"]
    assert load(BASE, "data.train=bundled:diabetes").data.train == "bundled:diabetes"
    for text in ("Nr {n} # {a}", "Q {q}\nA {a}", " Q {q} "):  # YAML: a comment, a folded line, spaces too many
        assert load(BASE, f"data.text_template={text}").data.text_template == text
    assert load(BASE, "run.dir = runs/a").run.dir == "runs/a"


def test_numbers_are_read_as_yaml_1_2(load):
    text = BASE + "stages: [{name: 12:30, train: [heads], steps: 010, lr: 1e-3, warmup_steps: 0}]"
    stage = load(text).stages[0]
    assert (stage.name, stage.steps, stage.lr, stage.warmup_steps) == ("12:30", 10, 1e-3, 0)


def test_the_resolved_config_round_trips(load):
    config = load(
        BASE,
        "loss.class_weights={5: 2, 7: 0}",
        "run.name='1e-3'",
        "data.text_template='{a}\\n\\n'",
        "model.causal_size=7",
    )
    assert load(config.to_yaml()) == config
    assert Config.model_validate(json.loads(config.model_dump_json())) == config


def test_changed_keys_leaves_out_what_a_resumed_run_may_change(load):
    old = load(BASE)
    assert changed_keys(old, load(BASE, "run.dir=elsewhere", "train.eval_every=3")) == []
    assert changed_keys(old, load(BASE, "stages.0.lr=1", "run.name=b")) == [("stages.0.lr", 2e-5, 1.0)]


def test_every_key_is_in_a_shipped_config_or_on_a_page():
    """The pages that `make docs` writes do not count. One piece of code has the key, and with it the name of a section
    inside a section."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED]
    pieces = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.yaml")]
    for page in [ROOT / "README.md", *pages]:
        outside, *blocks = re.split(r"^ *```", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        pieces += blocks[::2]
        for text in (outside, *blocks[1::2]):
            pieces += re.findall(r"`([^`\n]+)`", text)
    words = [set(re.findall(r"[a-z_]+", piece)) for piece in pieces]
    keys = [place.replace(".N", "") for place in _places(Config, "")]

    def shown(key: str) -> bool:
        wanted = set(key.split(".")[1:][-2:] or [key]) - {"numbers", "watch"}  # pages of their own
        return any(wanted <= found for found in words)

    hidden = sorted(key for key in keys if not shown(key))
    assert hidden == [], "add it to the page of its subject, or make it a constant"


def test_the_json_schema_knows_every_key():
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        tree, _ = yaml_text.parse(path.read_text(encoding="utf-8"))
        assert not [error.message for error in validator.iter_errors(tree)], path.name
        assert not validator.is_valid({**tree, "loss": {"reg_weigth": 1.0}})


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["heads", "lora", "qwen2", "{a}", "1e-3", "~", "train", "seed", "all-linear", ".nan", "x: y"]),
)
keys = st.one_of(
    st.sampled_from(sorted({name for place in _places(Config, "") for name in place.split(".")})),
    st.text(max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
raw = st.sampled_from(["[", "{a: 1, a: 2}", "[heads]", "{5: 0.5}", "3", "0.5", "{", "&a 1", "!!x y"])
dotted = st.sampled_from(sorted(place.replace(".N", ".0") for place in _places(Config, "")))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_a_written_config_is_read_back_equal(tree):
    value, _ = yaml_text.parse(yaml_text.dump(tree)) if _distinct(tree) else (tree, None)
    assert repr(value) == repr(tree)


BUILT = "model: {architecture: {model_type: qwen2}}\ndata: {train: a}\n"


@pytest.mark.parametrize(
    ("base", "overrides", "row", "w_num"),
    [
        (BASE, [], "digits", None),  # a base from elsewhere never saw <NUM>
        (BUILT, [], "inherit", 0.2),  # a random one knows no digits either
        (BUILT, ["model.pretrain.steps=3"], "inherit", 1.0),  # on texts with <NUM>; there is little to preserve
        (BASE, ["start=seed"], "inherit", 1.0),
        (BUILT, ["model.pretrain.steps=3", "start=seed"], "inherit", 1.0),
    ],
)
def test_the_default_start_of_num_depends_on_the_bases_data(load, base, overrides, row, w_num):
    config = load(base, *overrides)
    assert config.num_row_init == row
    assert config.w_num_scale == w_num
    assert load(config.to_yaml()) == config


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sections=st.dictionaries(st.sampled_from(list(Config.model_fields)), trees, max_size=4),
    overrides=st.lists(st.tuples(dotted, plain | raw), max_size=3),
    odd=st.text(max_size=12),
)
def test_any_tree_with_any_overrides_is_a_config_or_a_user_error(load, sections, overrides, odd):
    tree = {"model": {"name_or_path": "x"}, "data": {"train": "a"}, **sections}
    for texts in ([f"{key}={value}" for key, value in overrides], [odd], [f"{odd}=3"]):
        try:
            config = load(yaml_text.dump(tree), *texts)
        except UserError:
            continue
        assert load(config.to_yaml()) == config


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=40) | st.text(alphabet="ab:-[]{}&*!?#'\" \n\t0.e~<%@|>", max_size=40).map(str.encode))
def test_any_bytes_are_a_config_or_a_user_error(tmp_path, data):
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(UserError):
        load_config(path)


def _distinct(tree: object) -> bool:
    """Whether every mapping's keys stay different as text (1 and true do not merge, but 1 and '1' are one key)."""
    if isinstance(tree, dict):
        names = [_name(key) for key in tree]
        return len(set(names)) == len(names) and all(map(_distinct, tree.values()))
    return all(map(_distinct, tree)) if isinstance(tree, list) else True


def _name(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)
