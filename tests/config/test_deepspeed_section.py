"""The section `deepspeed`: a file, Hugging Face's "auto", keys that move to ours, keys that are refused."""

import random
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS
from support.deepspeed_keys import Key, keys, other_value, top_level

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.deepspeed_section import DEFAULTS, DONE, MOVED, PASSED, REFUSED, _nested
from cqwen_dist.config.messages import _places
from cqwen_dist.config.reading import given_config
from cqwen_dist.config.yaml_text import leaves

# As transformers' documentation has it for ZeRO-3.
STOCK = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {
    "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
  },
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "none", "pin_memory": true},
    "overlap_comm": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null},
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 0.5,
  "steps_per_print": 2000,
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": 4,
  "wall_clock_breakdown": false
}"""


def config(deepspeed: Any, **sections: Any) -> Config:
    given = {"model": {"name_or_path": "x"}, "data": {"train": "a"}, "deepspeed": deepspeed, **sections}
    return given_config(given, {})


def test_a_stock_hugging_face_file_is_translated(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(STOCK)
    found = config(str(file), train={"weight_decay": 0.1})
    assert (found.parallel.zero_stage, found.parallel.offload) == (3, "optimizer")
    assert (found.train.micro_batch_size, found.train.max_grad_norm, found.train.weight_decay) == (4, 0.5, 0.1)
    assert (found.train.precision, found.train.global_batch_size) == ("fp32", 32)
    assert found.deepspeed == {
        "zero_optimization": {"offload_optimizer": {"pin_memory": True}, "overlap_comm": True, "sub_group_size": 1e9},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    assert given_config(found, {}) == found, "a resolved config is translated again on resuming"


# As LLaMA-Factory has it for ZeRO-2.
ZERO_2 = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **{"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False},
        **{"reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
        "round_robin_gradients": True,
    },
}


def test_a_stock_file_for_zero_2_keeps_what_acts_there() -> None:
    """What stage 2 does not act on has DeepSpeed's default, and is dropped."""
    buckets = {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}
    kept = {**buckets, "overlap_comm": False, "round_robin_gradients": True}
    assert config(ZERO_2).deepspeed == {"zero_optimization": kept}


def test_our_key_may_say_the_same_and_nothing_else() -> None:
    stage = {"zero_optimization": {"stage": 2}}
    assert config(stage, parallel={"zero_stage": 2}).parallel.zero_stage == 2
    with pytest.raises(UserError, match=r"deepspeed.zero_optimization.stage: found 2, allowed: .*zero_stage says .1."):
        config(stage, parallel={"zero_stage": 1})
    assert config({"bf16": {"enabled": True}}).train.precision == "bf16"
    assert {key for key, _ in MOVED.values()} <= set(_places(Config, ""))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization"),
        ({"overlap_comm": True}, "overlap_comm: DeepSpeed has no such key"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "optimizer.params.lr: .*stages.N.lr"),
        ({"fp16": {"enabled": True}}, "deepspeed.fp16.enabled: found True, .*loss scale.*bf16"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param.device: .*each forward pass"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: found 2, allowed: parallel"),
        ("none.json", "deepspeed: found 'none.json', allowed: a mapping, or a JSON file with one .No such file"),
    ],
)
def test_what_cannot_be_is_refused_by_name_with_the_reason(section: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(section)


KEYS = keys()
LAYOUTS = [{"zero_stage": stage, "offload": kept} for stage in (1, 2, 3) for kept in ("none", "optimizer")]


def with_section(section: dict[str, Any], parallel: dict[str, Any]) -> Config:
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
            with_section({key.path: key.default}, parallel)  # what holds anyway
        try:
            found = with_section({key.path: value}, parallel)
        except UserError as refusal:
            names_key = refusal.key.startswith(("deepspeed.", "parallel.", "train."))
            if not (names_key and len(str(refusal.allowed)) > 10):
                raise
        else:
            told = dict(leaves(found.deepspeed))
            off = key.path.startswith(("fp16.", "zero_optimization.offload_param."))  # without the section's switch
            off |= value is False and not key.path.startswith("zero_")  # of a section that asks for nothing
            assert told.get(key.path) == value or key.path in (*DONE, *MOVED) or off, f"{key.path} is dropped"
            again = with_section(told, found.parallel.model_dump())
            assert again.deepspeed == found.deepspeed, "a resumed run reads it again"


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
        with_section(section, parallel)
