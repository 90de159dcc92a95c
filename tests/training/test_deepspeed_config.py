"""DeepSpeed's configuration is a function of ours; additions are merged, contradictions refused by name."""

import json
from typing import Any

import pytest
from matrix.sharded_training import Case, config_of

from cqwen_dist.config import Config, UserError
from cqwen_dist.training.zero.engine import refuse_unknown
from cqwen_dist.training.zero.settings import deepspeed_config


def config(zero: int = 2, precision: str = "bf16", **additions: Any) -> Config:
    found = config_of(Case(2, 1, zero, precision, 1, "heads+lora")).model_dump()
    return Config.model_validate({**found, "deepspeed": additions})


def test_the_deepspeed_config_follows_from_the_projects_config() -> None:
    found = deepspeed_config(config(), 4, 1000)
    assert found["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    assert found["train_batch_size"] == 4 * found["train_micro_batch_size_per_gpu"]
    assert found["bf16"] == {"enabled": True}
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in deepspeed_config(config(zero=1), 4, 1000)
    assert json.loads(json.dumps(found)) == found  # environment.json has it


def test_extra_deepspeed_settings_are_merged() -> None:
    zero = {"overlap_comm": True, "reduce_bucket_size": 7, "stage": 2}
    found = deepspeed_config(config(comms_logger={"enabled": True}, zero_optimization=zero), 4, 1000)
    assert found["comms_logger"] == {"enabled": True}
    assert found["zero_optimization"] == {**zero, "allgather_bucket_size": 1000}


@pytest.mark.parametrize(
    ("additions", "key", "says"),
    [
        ({"zero_optimization": 3}, "deepspeed.zero_optimization", "stage"),
        ({"gradient_accumulation_steps": 2}, "deepspeed.gradient_accumulation_steps", "accumulates itself"),
        ({"train_batch_size": 7}, "deepspeed.train_batch_size", "train.micro_batch_size"),
    ],
)
def test_contradicting_deepspeed_settings_are_refused_by_name(additions: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        deepspeed_config(config(**additions), 4, 1000)
    assert refusal.value.key == key


def test_a_key_that_deepspeed_does_not_have_is_refused_by_name() -> None:
    refuse_unknown({"steps_per_print": 2, "zero_optimization": {"overlap_comm": True}})
    with pytest.raises(UserError, match=r"deepspeed\.zero_optimization\.overlap_com: found True, .*not permitted"):
        refuse_unknown({"zero_optimization": {"overlap_com": True}})
