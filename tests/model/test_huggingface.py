"""CausalQwen as a Hugging Face model: folders round-trip, Auto classes find it, LoRA travels or is merged."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.numerics import assert_all_close, assert_close, gradients
from support.tiny import HIDDEN, NUM, VOCAB, random_batch, random_ids, tiny_base, tiny_causal_lm
from support.words import save_words
from transformers import AutoModel, AutoModelForCausalLM

from cqwen_dist.config import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.heads.seed_losses import CausalQwenLoss
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel

LORA = {"r": 3, "alpha": 6, "dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SHAPES = {
    "plain": {},
    "number dims, C > H": {"number_dims": 4, "causal_size": HIDDEN + 3},
    "scalar C, exp": {"scalar_threshold": True, "scale_activation": "exp"},
    "standardised": {"target": {"name": "standardise", "median": 152.0, "scale": 40.5}},
    "lora": {"lora": LORA},
    "arithmetic": {"candidates": "arithmetic", "number_dims": 2},
    "law": {"target": {"name": "standardise", "median": 152.0, "scale": 40.5, "law": "laplace"}},
    "wide": {"wide": 64, "random_features": 8, "depths": 2, "number_dims": 2, "candidates": "arithmetic"},
}


def worn(kind: str = "qwen2", tied: bool = False, **shape) -> CausalQwenForCausalLM:
    """Every parameter moved, so that nothing can come back right by being rebuilt; adapters not zero."""
    model = tiny_causal_lm(kind, tied=tied, **shape)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def outputs(model: CausalQwenForCausalLM) -> tuple[torch.Tensor, ...]:
    batch = random_batch()
    with torch.no_grad():
        return model.model(batch.input_ids, batch.numeric_values, batch.attention_mask)


def assert_same_outputs(model: CausalQwenForCausalLM, loaded: CausalQwenForCausalLM, tolerance: float = 1e-5) -> None:
    """To two layers of rounding (of fp32, unless told): a mapped tensor begins anywhere, and a BLAS may go by that."""
    for a, b in zip(outputs(model), outputs(loaded), strict=True):
        assert_close(b, a, tolerance)


KINDS = [("qwen2", True), ("qwen3", False), ("llama", True), ("mistral", False)]


@pytest.mark.parametrize(("shape", "kind", "tied"), [(s, *k) for s, k in zip(SHAPES, 2 * KINDS, strict=True)])
def test_a_saved_folder_round_trips(shape: str, kind: str, tied: bool, tmp_path: Path) -> None:
    model = worn(kind, tied, **SHAPES[shape])
    assert all(p.ndim for p in model.parameters()), "DeepSpeed cannot flatten one of no dimension"
    model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".bin", ".pt", ".pth")] == []
    assert (tmp_path / "model.safetensors").is_file()
    for loader in (CausalQwenForCausalLM, AutoModelForCausalLM, AutoModel):
        again, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert isinstance(again, CausalQwenForCausalLM)
        state, loaded = model.state_dict(), again.state_dict()
        assert state.keys() == loaded.keys()
        assert all(torch.equal(state[name], loaded[name]) for name in state)
        assert_same_outputs(model, again.eval())
        assert again.config.to_diff_dict() == model.config.to_diff_dict()
        assert again.model.target == model.model.target
        assert again.model.abduction.scale_floor == model.model.abduction.scale_floor


def test_heads_stay_fp32_whatever_dtype_is_asked_for(tmp_path: Path) -> None:
    worn(lora=LORA).save_pretrained(tmp_path)
    again = CausalQwenForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    heads = ("model.abduction.", "model.action.", "w_num", "num_row")
    for name, p in again.named_parameters():
        assert p.dtype == (torch.float32 if any(h in name for h in heads) else torch.bfloat16), name
    assert all(bool(t.isfinite().all()) for t in outputs(again))


def test_a_cast_leaves_the_heads_as_they_are() -> None:
    model, before = worn(number_dims=2, wide=64), worn(number_dims=2, wide=64).state_dict()
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    for name, part in model.named_parameters():
        if any(head in name for head in (".abduction.", ".action.", ".wide.", "w_num", "num_row")):
            assert torch.equal(part, before[name]), name
        else:
            assert part.dtype == torch.bfloat16, name
    assert all(bool(t.isfinite().all()) for t in outputs(model))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_base(tied=True).save_pretrained(folder)
    return folder


def test_from_base_without_a_tokenizer_takes_the_last_row(base_folder: Path) -> None:
    model = CausalQwenForCausalLM.from_base(str(base_folder)).eval()
    assert model.config.num_token_id == VOCAB - 1
    assert model.config.used_rows == VOCAB
    ids = random_ids(2, 6)
    with torch.no_grad():
        expected = tiny_base(tied=True)(input_ids=ids).logits
        assert_close(model(ids, logits_to_keep=6).logits, expected, 1e-6, "logits")
    given = CausalQwenForCausalLM.from_base(str(base_folder), num_token_id=50).config
    assert (given.num_token_id, given.used_rows) == (50, VOCAB)  # nobody said that the rows behind are spare


def test_from_base_with_a_tokenizer_takes_its_first_spare_row(base_folder: Path, tmp_path: Path) -> None:
    tiny_base().save_pretrained(tmp_path)
    save_words(tmp_path, 77)
    config = CausalQwenForCausalLM.from_base(str(tmp_path)).config
    assert (config.num_token_id, config.used_rows) == (77, 78)
    assert CausalQwenModel(str(tmp_path)).config.num_token_id == 77
    save_words(tmp_path, VOCAB + 2)
    with pytest.raises(UserError, match="no row for <NUM>"):
        CausalQwenForCausalLM.from_base(str(tmp_path))


def test_from_base_with_texts_starts_as_a_run_does_and_warns_without(one_rank, caplog) -> None:
    texts = [json.loads(line)["text"] for line in (one_rank.parent / "texts.jsonl").read_text().splitlines()]
    base = str(one_rank / "base")
    batch = CausalQwenTokenizer.from_pretrained(base)(texts, padding=True, return_tensors="pt", padding_side="right")
    loss = {}
    for name, given in (("seed", {}), ("calibrated", {"texts": iter(texts), "word_terms": {}})):
        model = CausalQwenForCausalLM.from_base(base, **given).eval()
        with torch.no_grad():
            loss[name] = float(model(**batch, labels=batch["input_ids"]).loss)
        assert ("texts=[...] calibrates" in caplog.text) is (name == "seed")
        caplog.clear()
    told = json.loads((one_rank / "start.json").read_text())["calibration"]
    assert loss["seed"] > told["seed_loss"] / 2
    assert loss["calibrated"] < 2 * told["loss"]
    assert (model.config.number_dims, model.config.target["name"]) == (8, "standardise")
    with pytest.raises(UserError, match=r"^texts: found a str, allowed: records or texts"):
        CausalQwenForCausalLM.from_base(base, texts="a text")


def test_the_constructor_of_the_seeds_works(base_folder: Path) -> None:
    """S2 5: CausalQwenModel(qwen_model_path, causal_hidden_size), forward -> four tensors."""
    model = CausalQwenModel(qwen_model_path=str(base_folder), causal_hidden_size=HIDDEN + 2).eval()
    shapes = [tuple(t.shape) for t in model(random_ids(2, 5), torch.zeros(2, 5))]
    assert shapes == [(2, 5, VOCAB), (2, 5, VOCAB), (2, 5), (2, 5)]


def test_forward_returns_logits_only_without_labels() -> None:
    model = worn(number_dims=2)
    batch = random_batch()
    given = (batch.input_ids, batch.numeric_values, batch.attention_mask)
    out = model(*given)
    assert out.loc_U.shape == out.scale_U.shape == (*batch.input_ids.shape, HIDDEN + 2)
    loc_s, _, loc_y, scale_y = outputs(model)
    assert_close(out.loc_Y, loc_y, 1e-6)
    assert_close(out.scale_Y, scale_y, 1e-6)
    for keep, wanted in [(None, loc_s), (0, loc_s), (2, loc_s[:, -2:]), (torch.tensor([1, 4]), loc_s[:, [1, 4]])]:
        assert_close(model(*given, logits_to_keep=keep).logits, wanted, 1e-5, f"logits_to_keep={keep}")
    learning = model(*given, labels=batch.input_ids)
    assert learning.logits is None, "training forms no [B,T,V]"
    both = model(*given, labels=batch.input_ids, logits_to_keep=0, return_dict=False)
    assert isinstance(both, tuple)
    assert torch.equal(both[0], learning.loss)
    assert_close(both[1], loc_s, 1e-5, "the logits stand second in the tuple")


@torch.no_grad()
def test_inputs_embeds_and_hidden_states() -> None:
    model, batch = worn(), random_batch()
    ids, values, mask = batch.input_ids, batch.numeric_values, batch.attention_mask
    embedded = model.get_input_embeddings()(ids)
    wanted = model(ids, values, mask, output_hidden_states=True)
    found = model(inputs_embeds=embedded, numeric_values=values, attention_mask=mask)
    assert_close(found.loc_U, wanted.loc_U, 1e-5)
    assert float((model(inputs_embeds=embedded, attention_mask=mask).loc_U - wanted.loc_U).abs().max()) > 1e-2
    assert len(wanted.hidden_states) == 1 + model.config.base_config.num_hidden_layers
    assert torch.equal(wanted.hidden_states[-1], model.model.features(ids, values, mask))
    assert found.hidden_states is None
    for odd, match in [
        ({}, "input_ids: found 'none'"),
        ({"input_ids": ids, "inputs_embeds": embedded}, "inputs_embeds too"),
        ({"input_ids": ids, "shift_labels": ids}, "shift_labels: found labels that were shifted before"),
        ({"input_ids": ids, "numeric_values": values[:, 1:]}, r"numeric_values: found \[4, 11\], allowed: \[4, 12\]"),
    ]:
        with pytest.raises(UserError, match=match):
            model(**odd)
    model.set_attn_implementation("eager")
    assert [tuple(w.shape) for w in model(ids, values, mask, output_attentions=True).attentions] == [(4, 4, 12, 12)] * 2
    model.config.output_hidden_states = True
    assert_close(model(ids, values, mask).hidden_states[-1], wanted.hidden_states[-1], 1e-4, "as the config says")


@torch.no_grad()
def test_a_returned_cache_continues_the_text() -> None:
    model, batch = worn(), random_batch(rows=1)
    ids, values = batch.input_ids, batch.numeric_values
    whole = model(ids, values)
    assert whole.past_key_values is None
    first = model(ids[:, :7], values[:, :7], use_cache=True)
    assert first.past_key_values.get_seq_length() == 7
    for name in ("past_key_values", "cache"):  # as transformers named it before 5.24, and since
        first = model(ids[:, :7], values[:, :7], use_cache=True)
        rest = model(ids[:, 7:], values[:, 7:], **{name: getattr(first, name)})
        assert_close(torch.cat([first.logits, rest.logits], 1), whole.logits, 1e-4)


def test_scores_and_scales_are_returned_on_request() -> None:
    model = worn(number_dims=2)
    batch = random_batch()
    loc_s, scale_s, _, _ = outputs(model)
    given = (batch.input_ids, batch.numeric_values, batch.attention_mask)
    out = model(*given, logits_to_keep=3, output_scales=True)
    assert_close(out.logits, loc_s[:, -3:], 1e-5)
    assert_close(out.scale_S, scale_s[:, -3:], 1e-5)
    assert out.log_probs is None
    log_probs = model(*given, logits_to_keep=3, output_log_probs=True).log_probs
    p = 0.5 + ((loc_s - model.model.action.threshold).double() / scale_s.double()).atan() / math.pi  # S0 5.1
    assert_close(log_probs, p[:, -3:].log(), 1e-4)


@pytest.mark.parametrize("numbers", [True, False])
def test_hugging_face_labels_give_the_seeds_loss(numbers: bool) -> None:
    """Not shifted, -100 ignored; the loss and every gradient of S0 5.3 on materialised scores."""
    model = worn(number_dims=2, target={"name": "standardise", "median": 5.0, "scale": 20.0})
    batch = random_batch(numbers=numbers)
    ids, values, mask = batch.input_ids, batch.numeric_values, batch.attention_mask
    labels = ids.masked_fill(~mask, -100)
    labels[1, :3] = -100
    loss = model(ids, values, mask, labels=labels).loss
    loss.backward()
    found = gradients(model)
    model.zero_grad()

    goals = model.model.target.forward(values[:, 1:])
    oracle = CausalQwenLoss(VOCAB, NUM, model.model.action.threshold)
    scores = [t[:, :-1] for t in model.model(ids, values, mask)]
    expected, _ = oracle(*scores, labels[:, 1:], goals, torch.ones_like(labels[:, 1:]))
    expected.backward()
    assert_close(loss, expected, 1e-5, "loss")
    wanted = gradients(model)
    if not numbers:  # there, what is only connected has no gradient, or a zero one
        wanted = {name: g for name, g in wanted.items() if float(g.abs().max())}
    assert_all_close({name: found[name] for name in wanted}, wanted, 2e-4)
    assert model(ids, values, mask, labels=torch.full_like(ids, -100)).loss == 0.0


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_never_learnt(side: str) -> None:
    """S0 5.3: what is masked counts in neither mean, labelled -100 or not; the loss is that of the texts alone."""
    model, batch = worn(number_dims=2), random_batch()
    mask = torch.arange(12) < torch.tensor([12, 9, 6, 7])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids, values = batch.input_ids.masked_fill(~mask, NUM), batch.numeric_values.masked_fill(~mask, 1e6)
    found = model(ids, values, mask.long(), labels=ids).loss
    assert_close(model(ids, values, mask, labels=ids.masked_fill(~mask, -100)).loss, found, 1e-6, "-100")

    oracle = CausalQwenLoss(VOCAB, NUM, model.model.action.threshold)
    sums = torch.zeros(4, dtype=torch.float64)
    for row in range(len(ids)):
        text, v = ids[row : row + 1, mask[row]], values[row : row + 1, mask[row]]
        scores = [t[:, :-1] for t in model.model(text, v)]
        _, terms = oracle(*scores, text[:, 1:], v[:, 1:], torch.ones_like(text[:, 1:]))
        words, numbers = text.shape[1] - 1, int((text[:, 1:] == NUM).sum())
        parts = (terms["cls_loss_mean"] * words, words, terms["reg_loss_effective"] * numbers, numbers)
        sums += torch.tensor(parts, dtype=torch.float64)
    assert_close(found, (sums[0] / sums[1] + sums[2] / sums[3]).float(), 1e-5, "the texts alone")


def test_a_trainer_that_wants_hidden_states_is_told_what_to_use() -> None:
    """TRL's trainers call the inner model with options of their own."""
    net = tiny_causal_lm().model
    with pytest.raises(UserError, match=r"hidden states for a softmax \(use_cache\), allowed: cqwen train, "):
        net(random_ids(1, 4), use_cache=False)
