"""Steps of fixed shapes write what steps over a growing cache write, compiled or not, and never wait for the device."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from support.numerics import assert_close
from support.tiny import CONTEXT, number_prompts, number_writer, random_ids
from torch import Tensor
from transformers import CompileConfig
from transformers.generation import LogitsProcessorList, TopKLogitsWarper

from benchmarks.launches import counting
from cqwen_dist.config import UserError
from cqwen_dist.generate import compiling
from cqwen_dist.generate.generator import _Continuation, generate
from cqwen_dist.generate.modes import MODES
from cqwen_dist.generate.numbers import GeneratedNumbers
from cqwen_dist.model import CausalQwenModel

# The whole graph is captured as for a GPU, but run by torch: compiling C++ for it would take a minute each.
TRACED = CompileConfig(backend="aot_eager")
COMPILED = pytest.mark.parametrize("config", [None, pytest.param(TRACED, marks=pytest.mark.slow)], ids=["", "compiled"])
MIXED = "words=causal,numbers=noise"
NUMBERS = ("values", "loc", "scale", "p_num", "p_word")


@pytest.fixture(scope="module")
def model() -> CausalQwenModel:
    return number_writer()


def assert_same(
    found: tuple[Tensor, GeneratedNumbers], wanted: tuple[Tensor, GeneratedNumbers], digits: int | None = None
) -> None:
    """Words are equal; numbers to 1e-4 of their size: attention sums over masked positions too, in another order, and
    what is fed back carries that on. With `digits` a value between two written ones may become either: one of its last
    digit."""
    assert torch.equal(found[0], wanted[0])
    for name in NUMBERS:
        own, other = getattr(found[1], name), getattr(wanted[1], name)
        assert torch.equal(own.isnan(), other.isnan()), name
        own, other = own.nan_to_num(), other.nan_to_num()
        if digits is not None and name == "values":
            last = 10.0 ** (other.abs().log10().floor() + 1 - digits)  # 0 where the value is
            assert bool(((own - other).abs() <= 1.001 * last).all()), name
        else:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("generated", "which"):
        own, other = getattr(found[1], name), getattr(wanted[1], name)
        assert (own is None) == (other is None)
        assert own is None or torch.equal(own, other), name


@pytest.mark.parametrize("mode", [*MODES, MIXED, "words=compatible,numbers=causal"])
@pytest.mark.parametrize("padded", [False, True])
def test_static_and_dynamic_caches_give_the_same_output(model, mode: str, padded: bool) -> None:
    """Greedy and drawn with a seed, through ends, with the digits that are meant."""
    free, _ = generate(model, **number_prompts(padded), mode=mode, seed=3, do_sample=True, max_new_tokens=12)
    ends = [int(free[0, 14]), int(free[1, 18])]
    for options in ({"do_sample": True}, {"digits": "auto"}, {"digits": 3, "eos_token_id": ends, "pad_token_id": 9}):
        given = {"mode": mode, "seed": 3, "max_new_tokens": 12, **options}
        dynamic = generate(model, **number_prompts(padded), **given)
        for _ in range(1 + ("digits" not in options)):  # a second time over the buffers of the first
            assert_same(generate(model, **number_prompts(padded), **given, cache_implementation="static"), dynamic)
    assert bool(dynamic[1].generated.any()) or mode not in ("standard", "causal")


@pytest.mark.parametrize(
    "mode",  # the others draw as these do
    [
        "standard",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sample", "compatible", "individual", MIXED)),
    ],
)
def test_a_whole_step_compiles_into_one_graph(model, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph: without a break, so without a read of a value and without a shape that depends on one."""
    monkeypatch.setattr(compiling.notes, "warning", lambda said: pytest.fail(said))
    given = {"mode": mode, "seed": 3, "do_sample": True, "max_new_tokens": 14, "digits": "auto"}
    static = {"cache_implementation": "static", "compile_config": TRACED}
    assert_same(generate(model, **number_prompts(), **given, **static), generate(model, **number_prompts(), **given))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made >= 1
    for other in (number_prompts(), number_prompts(seed=8)):
        assert_same(generate(model, **other, **given, **static), generate(model, **other, **given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made, "a later generation compiled a step again"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("llama", {"candidates": "arithmetic", "symbols": {"+": [3, 4], "=": [5]}, "constants": [7.0]}),
        pytest.param("mistral", {}, marks=pytest.mark.slow),  # a window of 5 positions
        ("qwen2", {"wide": 512}),
    ],
    ids=lambda part: part if isinstance(part, str) else next(iter(part), "plain"),
)
@COMPILED
def test_the_static_cache_works_with_every_kind_of_model(kind: str, shape: dict[str, Any], config: Any) -> None:
    net = number_writer(kind, **shape)
    with torch.no_grad():
        if net.wide is not None:  # tables as after a calibrated start
            for table in (net.wide.weight, net.wide.numbers.linear, net.wide.numbers.slope):
                table.normal_(std=0.3)
        if "candidates" in shape:
            net.action.candidate_weight.normal_()
            net.action.candidate_forms.normal_()
            net.action.candidate_bias.fill_(-0.5)
    given = {"max_new_tokens": 16, "digits": 4}
    dynamic = generate(net, **number_prompts(), **given)
    given |= {"cache_implementation": "static", "compile_config": config}
    assert_same(generate(net, **number_prompts(), **given), dynamic, digits=4)
    assert bool(dynamic[1].generated.any())
    if "candidates" in shape:
        assert bool((dynamic[1].which >= 0).any())
        assert not bool((dynamic[1].which[dynamic[1].generated] >= 0).all())


@COMPILED
def test_logits_processors_see_ids_without_padding(model, config: Any) -> None:
    lengths: list[int] = []

    def look(ids: Tensor, logits: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        return TopKLogitsWarper(9)(ids, logits)

    given = {"mode": "compatible", "do_sample": True, "seed": 1, "max_new_tokens": 6}
    given["logits_processor"] = LogitsProcessorList([look])
    dynamic = generate(model, **number_prompts(), **given)
    given |= {"cache_implementation": "static", "compile_config": config}
    assert_same(generate(model, **number_prompts(), **given), dynamic)
    assert lengths == [8, 9, 10, 11, 12, 13] * 2


@COMPILED
def test_cached_graphs_and_buffers_are_not_shared_between_calls_and_models(model, config: Any) -> None:
    """A result stays as it is; a copy of the model runs its own weights; other shapes and weights count."""
    static = {"cache_implementation": "static", "max_new_tokens": 9}
    traced = {**static, "compile_config": config}
    first, numbers = generate(model, **number_prompts(), **traced)
    before = first.clone(), numbers.values.clone()
    generate(model, **number_prompts(seed=8), **static)
    assert torch.equal(first, before[0])
    assert torch.equal(numbers.values, before[1])
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.action.cls_weight.mul_(-1.0)
    assert_same(generate(other, **number_prompts(), **traced), generate(other, **number_prompts(), max_new_tokens=9))
    assert_same(generate(model, **number_prompts(), **traced), (first, numbers))
    assert not torch.equal(generate(other, **number_prompts(), **static)[0], first)
    assert generate(other.to(torch.bfloat16), **number_prompts(), **static)[0].shape == first.shape  # a cache in bf16
    one = {name: part[:1] for name, part in number_prompts().items()}
    assert_same(generate(model, **one, **static), generate(model, **one, max_new_tokens=9))
    given = {**one, **static, "mode": "noise", "seed": 1}
    with torch.inference_mode():  # the random numbers are kept from here on, beside buffers from outside
        drawn = generate(model, **given)[0]
    assert torch.equal(generate(model, **given)[0], drawn)
    assert pickle.loads(pickle.dumps(model.kept_decoding)).buffers is None
    assert "kept_decoding" not in "".join(model.state_dict())


@pytest.mark.parametrize("mode", ["standard", pytest.param("individual", marks=pytest.mark.slow)])
@COMPILED
def test_a_backbone_in_bf16_has_a_shortlist_of_words(mode: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of the weights as they are at each generation, decides as fp32 does, and goes with other shapes."""
    net = number_writer(base={"vocab_size": 2003}, used_rows=2003)
    for part in (net.transformer, net.features.embedding.token_embedding):  # as in a folder: w_num stays fp32
        part.to(torch.bfloat16)
    batch, places = {**number_prompts(padded=False), "mode": mode, "seed": 3}, set()
    for factor in (1.0, -1.0):
        with torch.no_grad():
            net.action.cls_weight.mul_(factor)
        found = generate(net, **batch, cache_implementation="static", compile_config=config)[0]
        near = net.kept_decoding.near
        assert near is not None
        assert torch.equal(near, net.action.cls_weight.bfloat16())
        places.add(near.data_ptr())
        with monkeypatch.context() as without:
            without.setattr(_Continuation, "near", lambda text: None)
            wanted = generate(net, **batch, cache_implementation="static")[0]
        assert int(wanted.max()) > 1000
        assert torch.equal(found, wanted)
    assert len(places) == 1  # a CUDA graph reads the same memory
    one = {name: part[:1] if isinstance(part, Tensor) else part for name, part in batch.items()}
    generate(net, **one | {"mode": "ovr"}, cache_implementation="static")
    assert net.kept_decoding.near is None
    with torch.no_grad():
        net.action.b_noise.zero_()
    generate(net, **one, cache_implementation="static")
    assert (net.kept_decoding.near is None) == (mode == "individual")  # every scale is 0, every strength infinite
    generate(net.float(), **one, cache_implementation="static")
    assert net.kept_decoding.near is None


def test_without_a_working_compiler_steps_run_eagerly(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler here")

    said: list[str] = []
    monkeypatch.setattr(compiling.notes, "warning", said.append)
    found = generate(
        model, **number_prompts(), cache_implementation="static", compile_config={"backend": broken}, max_new_tokens=9
    )
    assert_same(found, generate(model, **number_prompts(), max_new_tokens=9))
    assert len(said) == 1
    assert "whole_step is not compiled" in said[0]


def test_static_cache_at_the_limits_of_the_context(model) -> None:
    for tokens, length in ((CONTEXT - 2, CONTEXT), (CONTEXT, CONTEXT)):
        assert generate(model, random_ids(1, tokens), cache_implementation="static")[0].shape == (1, length)
    assert generate(model, random_ids(1, 4), cache_implementation="static", max_new_tokens=0)[0].shape == (1, 4)
    for options, match in (
        ({"cache_implementation": "hybrid"}, "cache_implementation: found 'hybrid', allowed: dynamic, static"),
        ({"cache_implementation": "static", "use_cache": False}, "cache_implementation: .*use_cache"),
    ):
        with pytest.raises(UserError, match=match):
            generate(model, random_ids(1, 4), **options)


def waits_of(model: CausalQwenModel, tokens: int, **options: Any) -> tuple[Counter[str], int]:
    """(By place, but for those of `Ending`; these)."""
    with counting() as launches:
        ids, _ = generate(model, **options, max_new_tokens=tokens)
        launches.end("")
    assert ids.shape[1] == 8 + tokens
    places = launches.waits[""]
    own = {place: count for place, count in places.items() if "generate/compiling.py:" in place}
    return places - Counter(own), sum(own.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_decoding_step_has_no_host_wait(model, mode: str) -> None:
    """8 more tokens cost 8 reads more, those of `Ending`, which on a GPU reads late."""
    given: dict[str, Any] = {"mode": mode, "seed": 3, "do_sample": True, "digits": "auto"}
    given |= {name: part.repeat(2, *[1] * (part.ndim - 1)) for name, part in number_prompts().items()}
    given["cache_implementation"] = "static"
    waits_of(model, 10, **given)  # a model's first generation also fills caches
    (before, few), (after, many) = (waits_of(model, tokens, **given) for tokens in (2, 10))
    # checks of the prompt, its padding mask in the first step, and the result: as many for 2 tokens as for 10
    assert before == after
    assert many - few == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", MODES)
def test_static_cache_on_a_gpu(model, mode: str) -> None:
    """CUDA graphs write what single launches write; random numbers are the device's own in both."""
    net = copy.deepcopy(model).cuda()
    batch = {name: part.cuda() for name, part in number_prompts().items()}
    given = {"mode": mode, "seed": 3, "do_sample": True, "digits": "auto", "max_new_tokens": 20}
    dynamic = generate(net, **batch, **given)
    for _ in range(2):
        found = generate(net, **batch, **given, cache_implementation="static")
        assert torch.equal(found[0], dynamic[0])
        assert_close(found[1].values, dynamic[1].values, 1e-5, "values")
