"""What users' libraries do with an exported folder: pipelines, PEFT, Trainer, accelerate."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from peft import LoraConfig, PeftModel, get_peft_model
from support.exported import TEXTS, run_snippet, tiny_pair, write_folder
from support.numerics import assert_close
from support.tiny import random_batch, tiny_causal_lm
from torch.utils.data import DataLoader
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TextGenerationPipeline,
    Trainer,
    TrainingArguments,
    pipeline,
)

import cqwen_dist.auto
from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import continue_text
from cqwen_dist.model import CausalQwenFeatures

# On Python 3.10 pip finds nothing newer than 5.20.
transformers_5_24 = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.24"),
    reason=f"transformers {transformers.__version__}, older than 5.24",
)
PROMPTS = ["he paid 1234.5 for the", "tea costs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("exported"), *tiny_pair())


@pytest.fixture
def pair(folder: Path) -> tuple[cqwen_dist.auto.CausalQwenForCausalLM, cqwen_dist.auto.CausalQwenTokenizer]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def batches(tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Three texts with numbers, one a batch, as a collator of transformers makes them."""
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return list(DataLoader([dict(tokenizer(text)) for text in TEXTS], batch_size=3, collate_fn=collate))


@transformers_5_24
def test_the_pipeline_reads_and_writes_numbers(folder: Path, pair) -> None:
    model, tokenizer = pair
    pipe = pipeline("text-generation", model=str(folder))
    expected = [w.text for w in continue_text(model, tokenizer, PROMPTS, max_new_tokens=20)]
    assert any(re.search(r"\d", text) for text in expected)
    options = {"max_new_tokens": 20, "do_sample": False}
    found = [pipe(prompt, **options)[0]["generated_text"] for prompt in PROMPTS]
    assert found == [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    together = pipe(PROMPTS, batch_size=2, return_full_text=False, **options)
    assert [rows[0]["generated_text"] for rows in together] == expected
    written = [w.numbers for w in continue_text(model, tokenizer, PROMPTS, max_new_tokens=20)]
    assert any(written)
    for (record,), numbers in zip(together, written, strict=True):
        assert [n["intervals"] for n in record["numbers"]] == [n.intervals for n in numbers]
        assert [n["value"] for n in record["numbers"]] == [n.written for n in numbers]
    assert pipe(PROMPTS[0], max_new_tokens=20)[0]["generated_text"] == found[0], "greedy by default"
    word = re.findall("[a-z]+", expected[0])[0]
    stopped = pipe(PROMPTS[0], stop_sequence=word, return_full_text=False, **options)[0]["generated_text"]
    assert stopped == expected[0][: expected[0].index(word) + len(word)]
    chat = [{"role": "user", "content": "tea costs 3.5"}]
    answer = pipe(chat, **options)[0]["generated_text"][-1]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert answer == {
        "role": "assistant",
        "content": continue_text(model, tokenizer, [prompt], max_new_tokens=20)[0].text.replace("<|endoftext|>", ""),
    }
    drawn = pipe(PROMPTS[0], max_new_tokens=20, do_sample=True, temperature=0.7, seed=5)
    assert drawn == pipe(PROMPTS[0], max_new_tokens=20, mode="compatible", temperature=0.7, seed=5)
    assert drawn[0]["generated_text"] != found[0]
    with pytest.raises(UserError, match=r"tokenizer: found '.*', allowed: the model's own, by AutoTokenizer"):
        pipeline("text-generation", model=model, tokenizer=tokenizer.tokenizer)


@transformers_5_24
def test_transformers_own_pipeline_class_draws_and_reads_no_number_as_0(pair) -> None:
    """It fills in do_sample and drops the values."""
    model, tokenizer = pair
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
    assert pipe("tea costs", max_new_tokens=4)[0]["generated_text"].startswith("tea costs")
    for options in ({}, {"do_sample": False}):
        with pytest.raises(UserError, match=r"numeric_values: found None, .*make it by transformers.pipeline"):
            pipe("tea costs 3.5", max_new_tokens=4, **options)


def test_the_readmes_snippet_prints_numbers_with_intervals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, *lines = run_snippet(Path(__file__).parents[2] / "README.md", "out/gsm8k", folder, capsys)
    prompt = "Tom has 3 bags of 12 apples. He has"
    assert text.startswith(prompt)
    found = [re.fullmatch(r"(\S+), with 90 % between (\S+) and (\S+)", line).groups() for line in lines]
    assert [number for number, *_ in found] == re.findall(r"-?\d+\.?\d*", text[len(prompt) :])
    assert found
    for number, low, high in found:
        assert float(low) < float(number) < float(high)
        assert len(number) <= 4, "two digits of a spread of some ten: no decimals"


def test_auto_model_gives_features(folder: Path) -> None:
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is CausalQwenFeatures
    batch = tokenizer(["tea costs 3.5", "milk costs 12 and more"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch, output_hidden_states=True, use_cache=True)
        z = model.model.features(**batch)
    assert torch.equal(found.last_hidden_state, z)
    assert torch.equal(found.hidden_states[-1], z)
    assert found[1].get_seq_length() == z.shape[1]
    extracted = pipeline("feature-extraction", model=str(folder))("tea costs 3.5", return_tensors=True)
    one = tokenizer("tea costs 3.5", return_tensors="pt")
    with torch.no_grad():
        assert_close(extracted, model(**one).last_hidden_state, 1e-5)


def test_peft_trains_an_adapter_and_generates_with_it(folder: Path, pair, tmp_path: Path) -> None:
    model, tokenizer = pair
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        (batch,) = batches(tokenizer)
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    moved = {name: p for name, p in adapted.named_parameters() if "lora_B" in name}
    assert any(".abduction." in name for name in moved), "the heads' maps too"
    assert all(p.any() for p in moved.values()), "an adapter that the loss does not see"
    after = {name.replace(".base_layer", ""): p for name, p in adapted.named_parameters()}
    assert all(torch.equal(after[f"base_model.model.{name}"], p) for name, p in before.items()), "adapters alone move"
    ids = adapted.eval().generate(**tokenizer("tea costs 3.5", return_tensors="pt"), max_new_tokens=4)
    assert ids.shape[1] > len(tokenizer.encode("tea costs 3.5"))
    adapted.save_pretrained(tmp_path)
    logits = adapted(**batch, logits_to_keep=0).logits
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    assert_close(again(**batch, logits_to_keep=0).logits, logits, 1e-5, "its tensors are mapped, and begin anywhere")
    assert_close(adapted.merge_and_unload()(**batch, logits_to_keep=0).logits, logits, 1e-4, "W + BA is rounded once")


def test_an_adapter_that_the_loss_would_not_see_is_refused(pair) -> None:
    model, tokenizer = pair
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[], target_parameters=["action.cls_weight"])
    with pytest.raises(UserError, match=r"target_parameters: found 'action.cls_weight', allowed: modules_to_save"):
        get_peft_model(model, config)(**batches(tokenizer)[0])


def test_trainer_takes_two_steps(pair, tmp_path: Path) -> None:
    model, tokenizer = pair
    rows = [dict(tokenizer(text)) for text in TEXTS]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=3, learning_rate=1e-3, use_cpu=True, report_to=[],
        logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, arguments, collate, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    (batch,) = batches(tokenizer)
    with torch.no_grad():
        wanted = float(model(**batch).loss)
        valueless = float(model(**{**batch, "numeric_values": torch.zeros_like(batch["numeric_values"])}).loss)
    assert abs(trainer.evaluate()["eval_loss"] - wanted) < 1e-3 * abs(wanted) < abs(wanted - valueless)
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert abs(first - wanted) < 1e-2 * abs(wanted), "the loss that is logged is the model's"
    trainer.save_model(str(tmp_path / "end"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "end").eval()
    kept = AutoTokenizer.from_pretrained(tmp_path / "end")
    assert kept.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        assert float(again(**batch).loss) == pytest.approx(float(model.eval()(**batch).loss), rel=1e-5)
        assert float(again(**batch).loss) < wanted


def test_ids_alone_never_read_a_number_as_0(folder: Path, pair) -> None:
    """As lm-eval hands them on: so it loads the tokenizer with numerals as words."""
    model, tokenizer = pair
    ids = tokenizer("tea costs 3.5", return_tensors="pt")["input_ids"]
    for call in (model, model.generate, partial(model, labels=ids), AutoModel.from_pretrained(folder)):
        with pytest.raises(UserError, match=r"numeric_values: found None, .*with read_numbers=False"):
            call(ids)
    model(tokenizer("tea costs", return_tensors="pt")["input_ids"])
    digits = AutoTokenizer.from_pretrained(folder, read_numbers=False)
    model(digits("tea costs 3.5", return_tensors="pt")["input_ids"])


@pytest.mark.parametrize("part", range(4))
def test_every_code_block_of_huggingface_md_runs(folder, tmp_path, monkeypatch, part) -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    assert blocks[part].count("\n") <= 25
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gsm8k").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    exec(blocks[part], {})
    ends = [None, "trained/model.safetensors", "adapter/adapter_model.safetensors", None]
    assert ends[part] is None or (tmp_path / "out" / str(ends[part])).is_file()


def test_under_autocast_the_heads_stay_in_fp32() -> None:
    """As under Trainer's bf16=True. A scale of 1e-3 beside a logit near 15 means nothing in bf16."""
    model, batch = tiny_causal_lm(wide=64, random_features=8, number_dims=2, candidates="arithmetic"), random_batch()
    with torch.no_grad():
        for part in model.parameters():
            part.add_(torch.randn(part.shape, generator=torch.Generator().manual_seed(7)) * 0.05)
    given = batch.input_ids, batch.numeric_values, batch.attention_mask
    labels = batch.input_ids.masked_fill(~batch.attention_mask, -100)
    z = model.model.features(*given)
    model.model.features.forward = lambda *_, keep=None, **more: z if keep is None else z.flatten(0, 1)[keep]
    logits: list[torch.Tensor] = []

    def seen(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return logits.append(scores.clone()) or scores

    asked = {"labels": labels, "logits_to_keep": 0, "output_scales": True, "output_log_probs": True}
    with torch.no_grad():
        plain = model(*given, **asked)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = model(*given, **asked)
            written = model.generate(*given[:2], max_new_tokens=1, return_numbers=True)
            model.generate(*given[:2], "compatible", max_new_tokens=1, logits_processor=[seen])
    for a, b in zip(cast.to_tuple(), plain.to_tuple(), strict=True):
        assert torch.equal(a, b)
    again = model.generate(*given[:2], max_new_tokens=1, return_numbers=True)
    model.generate(*given[:2], "compatible", max_new_tokens=1, logits_processor=[seen])
    assert torch.equal(*logits)
    assert torch.equal(written[1].scale, again[1].scale)
    assert torch.equal(written[1].p_num.nan_to_num(), again[1].p_num.nan_to_num())


def test_heads_that_are_quantised_by_hand_are_refused():
    model = tiny_causal_lm()
    weight = model.model.abduction.loc_net.weight
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.int8)  # as a quantiser that goes past transformers leaves it
    said = r'model.abduction.loc_net.weight of torch.int8.*\["model.abduction", "model.act'
    with pytest.raises(UserError, match=said):
        model(random_batch(1, 4).input_ids)
