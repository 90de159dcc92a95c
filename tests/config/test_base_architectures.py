"""Architectures are data: no other module asks for one by name, and what their files say is what the package does."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import capability_table
from support.runs import write_config
from support.tiny import tiny_base, tiny_model

from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.config.architectures import ARCHITECTURES, architecture
from cqwen_dist.config.architectures.base_architecture import USUAL, Capabilities, Support
from cqwen_dist.config.shape import SHAPE_KEYS
from cqwen_dist.sizes.architecture import Architecture

ROOT = Path(__file__).parents[2]
HOME = ROOT / "cqwen_dist" / "config" / "architectures"
NAME = re.compile(rf"({'|'.join(ARCHITECTURES)})\w*", re.IGNORECASE)
OURS = re.compile("causal_?qwen", re.IGNORECASE)  # the model_type of an exported model, which is no base's
BROKEN = Support("unsupported", "its layers have hooks")


def by_name(source: str) -> Iterator[str]:
    """The places in a module that compare a `model_type`, or name an architecture or a class of one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not OURS.search(text := ast.unparse(node)):
            sides = [node.left, *node.comparators]
            if any(_reads_model_type(side) for side in sides):
                yield f"{node.lineno}: {text}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield f"{node.lineno}: {node.value}"


def _reads_model_type(node: ast.expr) -> bool:
    if isinstance(node, (ast.Attribute, ast.Name)):
        return "model_type" in (getattr(node, "attr", ""), getattr(node, "id", ""))
    asked = node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
    return any(isinstance(part, ast.Constant) and part.value == "model_type" for part in asked)


def test_no_module_outside_the_folder_compares_a_model_type_or_names_an_architecture() -> None:
    files = [p for part in ("cqwen_dist", "experiments", "launch") for p in (ROOT / part).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{place}"
        for path in files
        if HOME not in path.parents
        for place in by_name(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask `architecture(model_type)` for a value, or give it a new field: " + "\n".join(found)


def test_a_file_of_an_architecture_is_short_and_is_in_the_list() -> None:
    files = {p.stem: p for p in HOME.glob("*.py")}
    own = {path for name, path in files.items() if name not in ("__init__", "base_architecture")}
    assert not [path.name for path in own if len(path.read_text(encoding="utf-8").splitlines()) > 60]
    source = "".join(path.read_text(encoding="utf-8") for path in own)
    assert sorted(re.findall(r'model_type="(\w+)"', source)) == sorted(ARCHITECTURES)
    assert USUAL in ARCHITECTURES


def test_the_pages_have_every_architecture_and_every_feature() -> None:
    page = (ROOT / "docs" / "bases.md").read_text(encoding="utf-8")
    for kind, base in ARCHITECTURES.items():
        assert f"| `{kind}` | {base.examples} |" in page
    assert [*capability_table.FEATURES] == [each.name for each in fields(Capabilities)]
    rows = [line.split(" | ")[0] for line in capability_table.page().splitlines()]
    assert all(f"| {feature}" in rows for feature in capability_table.FEATURES.values())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_names_are_those_of_the_real_model(kind: str) -> None:
    base, real = architecture(kind), tiny_base(kind)
    sizes = Architecture.of(real.config.to_dict())
    plan = [layer for count, layer in sizes.stack for _ in range(count)]
    layers = [*real.model.layers]
    assert len(plan) == len(layers) == 2
    for blocks, layer in zip(plan, layers, strict=True):
        maps = {(n.rsplit(".", 1)[-1], m) for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
        wanted = {(n, m.in_features, m.out_features, m.bias is not None) for n, m in maps}
        assert {(m.name, m.rows, m.columns, m.bias) for block in blocks for m in sizes.maps(block)} == wanted
        assert sorted(sizes.tensors(blocks)) == sorted(p.numel() for p in layer.parameters())
    assert {base.table, base.head} <= real.state_dict().keys()
    assert base.outside is None or any(name.endswith(".".join(base.outside)) for name in real.state_dict())
    assert (sizes.window == 5) == (getattr(real.config, "sliding_window", None) == 5)  # the tiny base's


def config_of(kind: str, **sections: Any) -> Config:
    model = {"architecture": {"model_type": kind}, **sections.pop("model", {})}
    return Config.model_validate({"data": {"train": "x"}, "model": model, **sections})


@pytest.mark.parametrize(
    ("capability", "sections", "key"),
    [
        ("varlen", {"model": {"attention": "varlen"}}, "model.attention"),
        ("quantize", {"model": {"quantize": "nf4"}, "train": {"precision": "bf16"}}, "model.quantize"),
        ("zero_3", {"parallel": {"zero_stage": 3}}, "parallel.zero_stage"),
        (
            "sequence_groups",
            {"model": {"attention": "varlen"}, "parallel": {"sequence_group_size": 2}},
            "parallel.sequence_group_size",
        ),
        ("packing", {"data": {"train": "x", "pack": True}}, "data.pack"),
    ],
)
def test_what_an_architecture_does_not_support_is_refused_with_the_reason(
    capability: str, sections: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config_of("llama", **sections)

    def given(support: Support) -> None:
        base = replace(ARCHITECTURES["llama"], capabilities=Capabilities(**{"varlen": Support(), capability: support}))
        monkeypatch.setitem(ARCHITECTURES, "llama", base)

    for support, notes in ((Support(), []), (Support("experimental", "untried"), ["untried"])):
        given(support)
        assert [note.rpartition(": ")[2] for note in settings.fit_to("llama")] == notes
        assert all(note.startswith(f"{key}: ") for note in settings.fit_to("llama"))
    given(BROKEN)
    with pytest.raises(UserError, match=rf"^{key}: .*another base than llama \(its layers have hooks") as refusal:
        settings.fit_to("llama")
    with pytest.raises(ValueError, match="its layers have hooks"):  # pydantic's, as reading.py takes it
        config_of("llama", **sections)
    assert refusal.value.key == key


def test_every_key_that_shapes_a_model_is_a_field_of_its_config(tmp_path: Path) -> None:
    config, shape = load_config(write_config(tmp_path)), tiny_model().config
    assert set(config.model_shape()) - {"word_terms", "learns_words"} == set(SHAPE_KEYS), "these shape no tensor"
    for field in SHAPE_KEYS:
        assert hasattr(shape, field), field
