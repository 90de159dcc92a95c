"""DeepSpeed's configuration is a function of ours; additions are merged, contradictions refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from matrix.sharded_training import Case, config_of
from support.runs import losses, train_run, write_config

from cqwen_dist.config import Config, UserError
from cqwen_dist.training.inputs import refuse_accelerate
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
    zero = {"overlap_comm": True, "reduce_bucket_size": 7}
    found = deepspeed_config(config(zero_optimization=zero), 4, 999)
    assert found["zero_optimization"] == {
        **zero,
        "stage": 2,
        "allgather_bucket_size": 1000,
    }  # DeepSpeed needs an even one


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"DEEPSPEED_ZERO_STAGE": "3"}, "ZERO_STAGE: found '3', allowed: 2 in accelerate; parallel.zero_stage decides"),
        ({"MIXED_PRECISION": "fp16"}, "MIXED_PRECISION: found 'fp16', allowed: bf16 or no"),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "parallel.offload decides"),
        ({"DEEPSPEED_CONFIG_FILE": "ds.json"}, "none in accelerate; the run's config decides"),
        ({"GRADIENT_CLIPPING": "7.0"}, "train.max_grad_norm decides"),
        ({"GRADIENT_ACCUMULATION_STEPS": "3"}, "train.global_batch_size decides"),
        ({"DYNAMO_BACKEND": "INDUCTOR"}, "model.compile_layers decides"),
        ({"USE_FSDP": "true"}, "USE_FSDP: found 'true'"),
        ({"USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "accelerate started one process instead"),
    ],
)
def test_a_setting_of_accelerate_that_the_config_contradicts_is_refused(asked: dict[str, str], says: str) -> None:
    env = {name if name == "MASTER_ADDR" else f"ACCELERATE_{name}": value for name, value in asked.items()}
    with pytest.raises(UserError, match=says):
        refuse_accelerate(config(), env)


def test_what_accelerate_says_by_itself_is_no_contradiction() -> None:
    quiet = {"MIXED_PRECISION": "no", "DYNAMO_BACKEND": "NO", "GRADIENT_ACCUMULATION_STEPS": "1", "USE_CPU": "False"}
    same = {"DEEPSPEED_ZERO_STAGE": "2", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none", "GRADIENT_CLIPPING": "none"}
    env = {f"ACCELERATE_{name}": value for name, value in (quiet | same).items()}
    refuse_accelerate(config(), env | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})


@pytest.mark.slow
def test_stage_1_with_deepspeeds_buckets_or_hooks_takes_the_same_steps(tmp_path: Path) -> None:
    found = []
    for section in ({}, {"overlap_comm": True}, {"reduce_bucket_size": 51}, {"allgather_bucket_size": 52}):
        (folder := tmp_path / str(len(found))).mkdir()
        given = {"deepspeed": {"zero_optimization": section}, "stages__0__steps": 2, "stages__1__steps": 2}
        train_run(write_config(folder, parallel__zero_stage=1, **given), world=2)
        environment = json.loads((folder / "run" / "environment.json").read_text())
        assert section.items() <= environment["deepspeed_config"]["zero_optimization"].items()
        found.append(losses(folder / "run"))
    for each in found:
        assert each == pytest.approx(found[0], rel=1e-4)
