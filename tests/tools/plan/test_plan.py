"""The plan's counts against real models, its arithmetic by hand, and its errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import qwen2_sizes

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.sizes.architecture import Architecture, read_architecture
from cqwen_dist.tiles import tile_shape
from cqwen_dist.tools.plan import activations
from cqwen_dist.tools.plan.comm import step_messages
from cqwen_dist.tools.plan.command import count_sequences, run
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.memory import GIB, phases
from cqwen_dist.tools.plan.question import Question
from cqwen_dist.tools.plan.stage_sizes import stage_sizes

SMALL = qwen2_sizes(1000, 64, 96, 4, 2, num_hidden_layers=3)
QWEN25_05B = qwen2_sizes(151_936, 896, 4864, 14, 2, num_hidden_layers=24, tie_word_embeddings=True)
(_, LAYER), *_ = Architecture.of(SMALL).stack


def config(*, architecture: dict[str, Any] | None = None, **sections: Any) -> Config:
    model = {"architecture": architecture or SMALL, **sections.pop("model", {})}
    data = {"train": "x", "sequence_length": 16, **sections.pop("data", {})}
    return Config.model_validate({"model": model, "data": data, **sections})


def planned(settings: Config, *, nodes: int = 1, gpus: int = 1, gib: float = 80.0) -> Plan:
    architecture = read_architecture(settings)
    return plan(settings, nodes=nodes, gpus_per_node=gpus, gpu_memory_gib=gib, architecture=architecture)


def size(result: Plan, name: str) -> int:
    return next(part.bytes for part in result.parts if part.name == name)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_missing_architecture_keys_get_transformers_defaults(kind):
    from transformers import AutoConfig

    real = AutoConfig.for_model(kind)
    base = Architecture.of({"model_type": kind})
    assert all(base.sizes[key] == getattr(real, key) for key in ARCHITECTURES[kind].defaults)
    assert (base.layers, base.heads) == (real.num_hidden_layers, real.num_attention_heads)
    assert base.window == (real.sliding_window if ARCHITECTURES[kind].window else None)
    assert (base.kv_heads, base.tied) == (real.num_key_value_heads, real.tie_word_embeddings)
    assert base.head_dim == (getattr(real, "head_dim", None) or real.hidden_size // real.num_attention_heads)


def test_each_part_of_memory_equals_values_by_hand():
    stage = [{"name": "all", "train": ["heads", "embedding", "lora"], "steps": 1}]
    train = {"precision": "bf16", "micro_batch_size": 4}
    result = planned(config(start="seed", train=train, stages=stage), gpus=2)
    base = Architecture.of(SMALL)
    assert size(result, "backbone (frozen)") == 2 * base.backbone_parameters
    assert size(result, "token embedding (frozen)") == 2 * 1000 * 64
    lora = base.lora_parameters(8, "all-linear")
    assert size(result, "LoRA: weights") == 2 * lora
    assert size(result, "LoRA: optimizer") == 12 * lora / 2  # ZeRO 1 over two ranks
    abduction = 2 * (64 * 64 + 64)
    assert size(result, "abduction") == 4 * abduction  # whole on every rank
    assert size(result, "abduction at the start") == 4 * abduction
    assert size(result, "W_cls") == 1000 * 64 * 4
    # two ranks with equal copies: each has moments of half of the matrices and rows, and of all vectors
    assert size(result, "moments of the heads") == 8 * (64 * 64 + 2 * 64 + (64 + 1) + 64 + 500 * 65)
    assert not any("bf16" in part.name for part in result.parts)  # W_cls is rounded block by block, never copied
    assert size(result, "b_cls and C") == 1000 * (4 + 4)
    assert result.trainable_parameters == lora + 2 * (64 * 64 + 64) + (64 + 1 + 64 + 2 * 64) + 1000 * 65
    assert (result.world, result.accumulation, result.fits) == (2, 4, True)
    assert result.device_gib == pytest.approx(sum(part.bytes for part in result.parts) / GIB)


def test_runs_of_one_job_have_the_base_once() -> None:
    """The plan is of the run with the peak; a further one adds its own weights, masters and moments."""
    stage = {"name": "all", "train": ["heads", "embedding", "lora"], "steps": 1}
    sizes = [{"micro_batch_size": size, "global_batch_size": 8} for size in (8, 1)]
    large, small = (config(start="seed", train=train, stages=[stage]) for train in sizes)
    asked = Question(gpus_per_node=0)
    alone, three = (
        {p["name"]: p["bytes"] for p in run(given, asked)[0]["parts"]} for given in ([large], [small, large, small])
    )
    own = ("embedding of", "LoRA:", "abduction", "regression", "noise", "W_cls", "b_cls", "moments")
    assert three.pop("further runs") == 2 * sum(size for name, size in alone.items() if name.startswith(own))
    assert three == alone


def test_a_layers_activations_equal_values_by_hand():
    """One token of one layer, bf16 and adapters on everything; see docs/planner.md."""
    base = Architecture.of(SMALL)
    h, i, q, kv, r, w = 64, 96, 64, 32, 8, 2
    settings = config(train={"precision": "bf16", "micro_batch_size": 4})
    one = stage_sizes(settings, base, world=1, kind="cuda")[1]
    by_hand = w * (h + 2 * q + 2 * kv + h + 4 * i + 7 * r) + 2 * 4 * (h + 1) + 4 * base.heads
    assert activations.layer_saved(one, LAYER) == one.tokens * by_hand


def test_packed_texts_without_a_mask_need_the_memory_of_unpacked_ones():
    """By hand: a mask repeats k and v for every head, and is kept as numbers in each layer and as bools once."""
    base, train = Architecture.of(SMALL), {"precision": "bf16", "micro_batch_size": 4}

    def one(kind: str = "cuda", architecture: Architecture = base, **data: Any) -> Any:
        attention = data.pop("attention", "mask")
        settings = config(model={"attention": attention}, data=data, train=train)
        return stage_sizes(settings, architecture, world=1, kind=kind)[1]

    plain, mask, within = one(), one(pack=True), one(pack=True, attention="varlen")
    assert activations.saved(within) == activations.saved(plain)
    q, kv, w, length = 64, 32, 2, 16
    more = w * (4 * q - 2 * q - 2 * kv) + length * w
    assert activations.layer_saved(mask, LAYER) - activations.layer_saved(plain, LAYER) == mask.tokens * more
    once = mask.tokens * length
    assert activations.saved(mask) - activations.saved(plain) == base.layers * mask.tokens * more + once
    on_cpu, plain_cpu = one("cpu", pack=True, attention="varlen"), one("cpu")
    beside = on_cpu.tokens * w * q  # the outputs of the texts put together, which o_proj's adapter reads
    assert activations.layer_saved(on_cpu, LAYER) - activations.layer_saved(plain_cpu, LAYER) == beside
    window = Architecture.of({**SMALL, "model_type": "mistral", "sliding_window": 8})
    assert activations.masked(one(architecture=window, pack=True))
    assert not activations.masked(one(architecture=window, pack=True, attention="varlen")), "the kernel knows it"
    assert activations.masked(one("cpu", architecture=window, pack=True, attention="varlen"))


def test_zero_shards_the_engine_and_the_group_shards_the_rows():
    one = planned(config(), gpus=4)
    three = planned(config(parallel={"zero_stage": 3, "vocab_group_size": 4}), gpus=4)
    for name in ("backbone (frozen)", "LoRA: weights"):
        assert size(three, name) == -(-size(one, name) // 4)
    assert size(three, "LoRA: optimizer") == size(one, "LoRA: optimizer")
    assert size(three, "W_cls") * 4 == size(one, "W_cls")
    odd = planned(config(parallel={"vocab_group_size": 3}, train={"global_batch_size": 24}), gpus=3)
    assert size(odd, "W_cls") == 334 * 64 * 4  # ceil(1000 / 3) rows of C = 64
    # replicas of rows: none; matrices [72, 64] of the abduction over three ranks
    assert size(odd, "moments of the heads") == 8 * (2 * 24 * 64 + 2 * 72 + 72 + 1 + 72 + 334 * 65)


def test_a_sequence_group_shares_activations_and_exchanges_the_heads():
    """Four heads and two key heads: a group of 4 exchanges each key head twice."""
    train = {"train": {"global_batch_size": 8, "micro_batch_size": 1}, "model": {"attention": "varlen"}}
    every = [{"name": "a", "train": ["heads", "embedding", "lora"], "steps": 1}]
    base, kept = Architecture.of(SMALL), {}
    for group in (1, 2, 4):
        split = config(**train, stages=every, parallel={"sequence_group_size": group})
        (s,) = stage_sizes(split, base, world=4, kind="cpu")
        assert (s.tokens, s.accumulation, s.step_tokens) == (16 // group, 2 * group, 128)
        kept[group] = group * activations.saved(s)
        exchanges = [m.bytes for m in step_messages(s) if m.group == "sequence"]
        heads = 2 * 4 + 2 * max(2, group)
        assert sum(exchanges) == (group > 1) * 2 * 3 * 32 * heads * 16 * 4  # twice, layers, tokens, heads, D, fp32
    output = 3 * 16 * 64 * 4  # o_proj's adapter keeps the output as it comes back from the other ranks
    assert kept[2] == kept[1] + output
    assert kept[4] == kept[1] + output + 3 * 16 * 2 * 2 * 16 * 4
    train["model"] |= {"architecture": None, "name_or_path": "unused"}
    for world, group, said in (
        (4, 3, "a divisor of the 4 ranks: 1, 2, 4"),
        (8, 8, "a divisor of the base's 4 attention"),
    ):
        split = Config.model_validate({**train, "data": {"train": "x"}, "parallel": {"sequence_group_size": group}})
        with pytest.raises(UserError, match=f"parallel.sequence_group_size: found {group}, allowed: {said}"):
            plan(split, nodes=1, gpus_per_node=world, architecture=SMALL)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_rounded_base_has_its_bytes_and_one_dequantised_map(kind: str) -> None:
    base = Architecture.of(SMALL)
    linear = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    outputs = 3 * (2 * 64 + 2 * 32 + 2 * 96 + 64)
    packed = linear + 4 * outputs if kind == "int8" else linear / 2 + linear / 64 + 4 * linear / 64 / 256
    short = {"model": {"quantize": kind}, "stages": [{"name": "a", "train": ["lora"], "steps": 1}]}
    result = planned(config(**short, loss={"constraint": {"mode": "off"}}))
    assert size(result, "backbone (frozen)") == round(packed) + 4 * (base.backbone_parameters - linear)
    assert size(result, "token embedding (frozen)") == 4 * 1000 * 64
    (sizes,) = stage_sizes(config(**short), base, world=1, kind="cuda")
    parts = {part.name: part.bytes for part in phases(sizes)["backward of the last layer"]}
    assert parts["a dequantised weight"] == 4 * 64 * 96


@pytest.mark.parametrize(("tokens", "c"), [(1, 896), (7001, 3584)])
def test_a_gpus_tiles_have_whole_blocks_of_words(tokens: int, c: int) -> None:
    """cuBLAS reads rows that begin anywhere element by element: a step of 7B took 1.7 times as long."""
    t, n = tile_shape(tokens, 151_936, c, "cuda")
    assert t == tokens
    assert n % 128 == 0


@pytest.mark.parametrize(
    ("sections", "ranks", "key", "allowed"),
    [
        ({"parallel": {"vocab_group_size": 3}}, 4, "parallel.vocab_group_size", "a divisor of the 4 ranks: 1, 2, 4"),
        ({"architecture": {**SMALL, "hidden_size": "a"}}, 1, "model.architecture.hidden_size", "a whole number"),
        ({}, 0, "--gpus-per-node", "0 .CPU. or more"),
    ],
)
def test_what_cannot_be_planned_is_a_user_error(sections, ranks, key, allowed):
    with pytest.raises(UserError, match=rf"^{key}: found .*, allowed: {allowed}"):
        planned(config(**sections), gpus=ranks or -1)


def test_the_architecture_is_read_from_a_model_folder(tmp_path):
    def by_name(name: str) -> dict[str, Any]:
        return read_architecture(Config.model_validate({"model": {"name_or_path": name}, "data": {"train": "x"}}))

    with pytest.raises(UserError, match="a folder with the model's config"):
        by_name("Someone/else")
    assert Architecture.of(by_name("Qwen/Qwen2.5-0.5B")) == Architecture.of(QWEN25_05B)
    assert Architecture.of(by_name("Qwen/Qwen2.5-72B-Instruct")).base_parameters == 72_706_203_648
    published = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
        "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
        "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    }
    for name, parameters in published.items():  # and 64 rows for <NUM>, as their words use all
        with_rows = Architecture.of(by_name(name))
        added = 64 * with_rows.hidden * (1 if with_rows.tied else 2)
        assert with_rows.base_parameters == parameters + added, name
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    for words, rows in ((900, 1000), (1000, 1024)):
        tokens = {"model": {"vocab": {f"w{i}": i for i in range(words - 1)}}, "added_tokens": [{"id": words - 1}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
        assert by_name(str(tmp_path))["vocab_size"] == rows
    (tmp_path / "tokenizer.json").unlink()
    assert by_name(str(tmp_path)) == SMALL
    inner = {"model_type": "qwen3_5_text", "max_position_embeddings": 64, "num_attention_heads": 4}
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": inner}))
    assert by_name(str(tmp_path)) == {**inner, "tie_word_embeddings": False}, "its context and heads are checked"


def test_an_epoch_has_as_many_texts_as_the_run_reads(tmp_path: Path) -> None:
    """The limit comes before the share for evaluation, which is rounded up; a header is no text."""
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_split

    names = ("a.jsonl", "b.csv", "c.txt")
    for name, line in zip(names, ('{"text": "tea %d"}', "tea %d", "tea %d\n"), strict=True):
        head = "text\n" if name == "b.csv" else ""
        (tmp_path / name).write_text(head + "".join(f"{line % i}\n" for i in range(101)))
    for name in names:
        for more in ({}, {"limit": 20, "eval_fraction": 0.12}, {"eval_fraction": 0.1}):
            data = config(data={"train": str(tmp_path / name), **more})
            assert count_sequences(data) == len(read_split(data.data, ReadReport())[0]), (name, more)


def test_the_plan_expects_a_cache_where_the_run_makes_one() -> None:
    """10 texts by 4 are 3 steps an epoch: a stage of 3 reads no text twice (`FeatureCache`)."""
    found = []
    for length in ({"steps": 3}, {"steps": 4}, {"epochs": 1.1}, {"epochs": 1.4}):
        stages = [{"name": "heads", "train": ["abduction"], **length}]
        each = config(train={"global_batch_size": 4, "micro_batch_size": 4}, stages=stages)
        found += [s.cached for s in stage_sizes(each, Architecture.of(SMALL), world=1, kind="cpu", sequences=10)]
    assert found == [False, True, False, True]
