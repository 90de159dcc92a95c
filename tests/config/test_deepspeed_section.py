"""The section `deepspeed`: what is passed on, where it acts, and what is refused by name."""

from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.deepspeed_section import ELSEWHERE, PASSED
from cqwen_dist.config.messages import _places
from cqwen_dist.config.reading import given_config


def config(section: Any, **parallel: Any) -> Config:
    given = {"model": {"name_or_path": "x"}, "data": {"train": "a"}, "parallel": parallel}
    return given_config({**given, "deepspeed": section}, {})


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("path", PASSED)
def test_a_setting_reaches_deepspeed_where_it_acts_and_is_refused_elsewhere(path: str) -> None:
    kind, where = PASSED[path]
    value = True if kind is bool else 7
    stages = [1, 2, 3] if where == "optimizer" else [int(stage) for stage in where.split()]
    for stage in (1, 2, 3):
        for offload in ("none", "optimizer"):
            if stage in stages and (where != "optimizer" or offload == "optimizer"):
                found = config(nested(path, value), zero_stage=stage, offload=offload)
                assert given_config(found, {}).deepspeed == nested(path, value), "a resumed run reads it again"
            else:
                with pytest.raises(UserError, match=f"deepspeed.{path}: .*DeepSpeed ignores it"):
                    config(nested(path, value), zero_stage=stage, offload=offload)


def test_deepspeed_knows_the_settings_and_takes_their_least_values() -> None:
    tree: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    for path, (kind, _) in PASSED.items():
        *above, name = path.split(".")[1:]
        (tree["offload_optimizer"] if above else tree)[name] = False if kind is bool else kind
    DeepSpeedZeroConfig(**tree)  # it refuses names that it does not have


def test_an_empty_section_and_a_number_with_an_exponent_are_taken() -> None:
    assert config({"zero_optimization": {}}).deepspeed == {"zero_optimization": {}}
    config({"zero_optimization": {"reduce_bucket_size": 5e8}})


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage: found 2, allowed: parallel.zero_stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer.device: .*parallel.offload",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param.device: .*zero_stage 3"),
        ({"zero_optimization": {"reduce_scater": False}}, "reduce_scater: .*only zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "'auto', allowed: a whole number from 1"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "a whole number from 1"),
        ({"zero_optimization": {"reduce_bucket_size": True}}, "a whole number from 1"),
        ({"zero_optimization": {"overlap_comm": 1}}, "true or false"),
        ({"zero_optimization": True}, "zero_optimization: found True, allowed: only"),
        ({"fp16": {"enabled": True}}, "deepspeed.fp16.enabled: found True, .*loss scale.*bf16"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "optimizer.params.lr: .*stages.N.lr"),
        ({"overlap_comm": True}, "overlap_comm: found True, allowed: only"),
        ("ds_config.json", "deepspeed: found 'ds_config.json'"),
    ],
)
def test_what_is_refused_names_what_to_take(section: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(section)


def test_the_keys_to_take_instead_exist() -> None:
    keys = set(_places(Config, ""))
    named = {word.strip(",:") for there in ELSEWHERE.values() for word in there.split() if "." in word}
    full = {word for word in named if word.split(".")[0] in ("parallel", "train", "model")}
    assert full
    assert full <= keys
