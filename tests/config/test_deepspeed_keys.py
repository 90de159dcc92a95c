"""Every key that the installed DeepSpeed reads is passed on where it acts, or refused with a reason."""

import random
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS
from support.deepspeed_keys import Key, drawn_section, keys, other_value, top_level

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.deepspeed_section import DEFAULTS, DONE, MOVED, PASSED, REFUSED, _nested
from cqwen_dist.config.reading import given_config
from cqwen_dist.config.yaml_text import leaves

KEYS = keys()
LAYOUTS = [{"zero_stage": stage, "offload": kept} for stage in (1, 2, 3) for kept in ("none", "optimizer")]


def config(section: dict[str, Any], parallel: dict[str, Any]) -> Config:
    given = {"model": {"name_or_path": "x"}, "data": {"train": "a"}, "parallel": parallel}
    return given_config({**given, "deepspeed": _nested(section)}, {})


def test_all_of_deepspeeds_names_are_decided() -> None:
    ours = {key.split(".")[0] for key in (*PASSED, *DEFAULTS, *DONE, *MOVED, *REFUSED)}
    assert top_level() - ours - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= {"bfloat16"}, "an old name of bf16"
    known = {key.path: key.default for key in KEYS}
    assert {path for path in (*PASSED, *DEFAULTS) if path not in known} <= {
        "zero_optimization.offload_param",  # whole sections
        "zero_optimization.zenflow",
        "zero_optimization.leaf_module",
    }
    for path, default in {**DEFAULTS, **{path: row[2] for path, row in PASSED.items()}}.items():
        assert (known.get(path) or None) == (default or None), f"{path}: DeepSpeed's default is another one"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_key_is_passed_on_where_it_acts_or_refused_with_a_reason(key: Key) -> None:
    value = "info" if key.path == "log_level" else "bf16" if key.path == "communication_data_type" else None
    value = other_value(key, random.Random(1)) if value is None else value
    for parallel in LAYOUTS:
        if key.path in (*PASSED, *DEFAULTS):
            config({key.path: key.default}, parallel)  # what holds anyway
        try:
            found = config({key.path: value}, parallel)
        except UserError as refusal:
            names_key = refusal.key.startswith(("deepspeed.", "parallel.", "train."))
            if not (names_key and len(str(refusal.allowed)) > 10):
                raise
        else:
            told = dict(leaves(found.deepspeed))
            off = key.path.startswith(("fp16.", "zero_optimization.offload_param."))  # without the section's switch
            off |= value is False and not key.path.startswith("zero_")  # of a section that asks for nothing
            assert told.get(key.path) == value or key.path in (*DONE, *MOVED) or off, f"{key.path} is dropped"


@pytest.mark.parametrize(
    ("section", "parallel", "says"),
    [
        ({"compile.deepcompile": True}, {}, "model.compile_layers"),
        ({"checkpoint.load_universal": True}, {}, "resume on any number of ranks"),
        ({"zero_optimization.zenflow.topk_ratio": 0.1}, LAYOUTS[3], "parallel.offload: optimizer; ZenFlow"),
        ({"zero_optimization.offload_optimizer.super_offload": True}, LAYOUTS[5], "parallel.offload: optimizer"),
        ({"zero_optimization.zero_quantized_weights": True}, LAYOUTS[4], "model.quantize"),
        ({"zero_optimization.stage3_max_live_parameters": 7}, {}, "with parallel.zero_stage 3: else DeepSpeed ignores"),
        ({"communication_data_type": "bf16"}, {}, "parallel.zero_stage 3, parallel.offload optimizer or overlap_comm"),
        ({"zero_optimization": True}, {}, "a mapping"),
        ({"zero_optimization.reduce_scater": False}, {}, "DeepSpeed has no such key; did you mean reduce_scatter"),
        ({"steps_per_print": 0}, {}, "a whole number from 1"),
        ({"flops_profiler.detailed": False}, {}, "flops_profiler.enabled true"),
    ],
)
def test_refusals_name_the_way_out(section: dict[str, Any], parallel: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(section, parallel)


def test_drawn_sections_are_passed_on_whole_or_refused() -> None:
    draw = random.Random(0)
    for _ in range(500):
        section, parallel = drawn_section(draw, KEYS, list(PASSED)), draw.choice(LAYOUTS)
        try:
            found = config(section, parallel)
        except UserError:
            continue
        told = dict(leaves(found.deepspeed))
        assert told.items() <= section.items()
        assert config(told, found.parallel.model_dump()).deepspeed == found.deepspeed, "a resumed run reads it again"
