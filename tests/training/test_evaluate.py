"""Every evaluation figure against its definition, on the whole [B,T,V] at once."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import tiny
from support.base_figures import measure_base
from support.ranks import Pool
from support.runs import VOCAB, cqwen_forked, losses, metrics, set_back, train_run, write_config, write_texts
from transformers import AutoModelForCausalLM

from cqwen_dist import api
from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.data.collate import collate
from cqwen_dist.data.load import Datasets, load_datasets
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.tools.export.export import export
from cqwen_dist.training.evaluation import number_metrics
from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint
from cqwen_dist.training.evaluation.evaluator import Evaluator
from cqwen_dist.training.evaluation.spread import Spread


@pytest.fixture(scope="module")
def data(one_rank: Path) -> Datasets:
    config = load_config(one_rank / "config.yaml")
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, VOCAB)
    return load_datasets(config.data, tokenizer)


@pytest.fixture(scope="module")
def held_out(data: Datasets) -> Batch:
    dataset = data.eval
    assert dataset is not None
    samples = [dataset[i] for i in range(len(dataset))]
    return collate(samples, pad_token_id=dataset.pad_token_id, num_token_id=dataset.num_token_id)


@torch.no_grad()
def test_metrics_equal_their_definitions(one_rank: Path, data: Datasets, held_out: Batch) -> None:
    found = metrics(one_rank)[-1]
    model = load_trained(one_rank)[0].model
    loc_s, scale_s, loc_y, scale_y = model(held_out.input_ids, held_out.numeric_values, held_out.attention_mask)
    keep, labels = held_out.labels >= 0, held_out.labels
    p = (0.5 + torch.atan((loc_s.double() - model.action.threshold.double()) / scale_s.double()) / math.pi)[keep]
    target = torch.nn.functional.one_hot(labels[keep], VOCAB).double()
    expected = {
        "eval/accuracy": float((p.argmax(-1) == labels[keep]).double().mean()),
        "eval/cls_loss_mean": float(torch.nn.functional.binary_cross_entropy(p, target, reduction="sum") / len(p)),
        "dist/ovr_prob_sum_median_standard": float(p.sum(-1).quantile(0.5)),
        "eval/perplexity": float(torch.nn.functional.cross_entropy(loc_s[keep].double(), labels[keep]).exp()),
        "eval/perplexity_ovr": float((p.sum(-1).log() - (p * target).sum(-1).log()).mean().exp()),
    }
    raw = held_out.numeric_labels[held_out.numeric_mask]
    loc, scale = loc_y[held_out.numeric_mask].double(), scale_y[held_out.numeric_mask].double()
    error = (model.target.inverse(loc) - raw).abs()
    goal = model.target.forward(raw).double()
    expected |= {
        "eval/reg_mae": float(error.mean()),
        "eval/reg_mdae": float(error.quantile(0.5)),
        "eval/reg_nll": float((torch.log(math.pi * scale) + torch.log1p(((goal - loc) / scale) ** 2)).mean()),
        **{
            f"eval/coverage_{level}": float(
                ((goal - loc).abs() <= math.tan(level * math.pi / 200) * scale).double().mean()
            )
            for level in (50, 90, 95)
        },
        "eval/width_90": float((2 * math.tan(0.45 * math.pi) * scale).median()) * model.target.scale,
        "eval/baseline_mdae": float(
            np.median(np.abs(raw.numpy() - np.median(np.concatenate([*data.train.number_parts()]))))
        ),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@torch.no_grad()
def test_precision_and_recall_of_num(one_rank: Path, data: Datasets, held_out: Batch) -> None:
    model = load_trained(one_rank)[0].model
    num, keep = model.config.num_token_id, held_out.labels >= 0
    true = held_out.labels[keep] == num
    for _ in range(100):  # until it is said at half of the places
        loc, scale, _, _ = model(held_out.input_ids, held_out.numeric_values, held_out.attention_mask)
        said = ((loc - model.action.threshold) / scale)[keep].argmax(-1) == num
        if said.double().mean() > 0.5:
            break
        model.action.cls_bias[num] += 0.05 * scale[..., num].median()
    hits = int((said & true).sum())
    assert 0 < hits < int(true.sum()) + int(said.sum()) - hits, "some are right, some are not"
    with distributed(alone=True):
        batches = EvalLoader(data.eval, rank=0, world=1, micro_batch_size=8)
        found = Evaluator(model, model.kept_features, batches, build_groups(1), baseline_value=1.0)()
    assert found["eval/num_precision"] == pytest.approx(hits / int(said.sum()))
    assert found["eval/num_recall"] == pytest.approx(hits / int(true.sum()))
    assert found["eval/num_f1"] == pytest.approx(2 * hits / int(said.sum() + true.sum()))


@pytest.mark.parametrize("number_dims", [0, 8])
@torch.no_grad()
def test_the_words_individual_equals_numpy_with_and_without_number_dimensions(pool: Pool, number_dims: int) -> None:
    """S3 5.4 over the words' dimensions of one prompt; number dimensions have names of their own."""
    found = pool(_individual, 1, number_dims)[0]
    model, batch = tiny.tiny_model(number_dims=number_dims), tiny.random_batch(1)
    u = model.abduction(model.kept_features(batch, batch.kept))
    parts = {"U": slice(tiny.HIDDEN), "U_number": slice(tiny.HIDDEN, None)}
    for name, dims in parts.items() if number_dims else [("U", slice(tiny.HIDDEN))]:
        for law, values in zip(("loc", "scale"), u, strict=True):
            x = values[:, dims].double().numpy()
            low, median, high = np.quantile(x, [0.25, 0.5, 0.75])
            expected = {"mean": x.mean(), "median": median, "std": x.std(ddof=1), "iqr": high - low}
            for k, value in expected.items():
                assert found.pop(f"dist/{name}_{law}_{k}") == pytest.approx(value, rel=1e-6, abs=1e-9), (name, k)
    assert not [name for name in found if name.startswith("dist/U_")]


def _individual(number_dims: int) -> dict[str, float]:
    model = tiny.tiny_model(number_dims=number_dims)
    return Evaluator(model, model.kept_features, [tiny.random_batch(1)], build_groups(1), baseline_value=1.0)()


def test_a_runs_metrics_begin_with_the_evaluation_of_the_start(one_rank: Path) -> None:
    first = json.loads((one_rank / "metrics.jsonl").read_text().splitlines()[0])
    start = json.loads((one_rank / "start.json").read_text())["eval"]
    assert first["step"] == 0
    assert {name: first[name] for name in start} == start
    assert {"eval/accuracy", "dist/U_scale_mean", "units_mean_scale"} <= first.keys()


LAWS = {
    "spread": lambda g: torch.randn(501, 7, generator=g) * 3 - 1,
    "heavy": lambda g: torch.tan(3.1 * (torch.rand(501, 7, generator=g) - 0.5)),
    "narrow": lambda g: 0.7 + 1e-4 * torch.rand(501, 7, generator=g),
    "one value": lambda g: torch.full((501, 7), 1.3),
    "none but one": lambda g: torch.tensor([[0.0, -2.0]]),
}


def _spread(law: str, kept: int) -> dict[str, float]:
    world, rank = dist.get_world_size(), dist.get_rank()
    spread, values = Spread(kept), LAWS[law](torch.Generator().manual_seed(0))
    for part in values[rank::world].split(100):
        spread.add(part)
    spread.add(values[:0])
    return spread.summary()


@pytest.mark.parametrize("kept", [1 << 18, 1500])
def test_a_spread_is_computed_over_all_ranks_values(pool: Pool, kept: int) -> None:
    """Mean and deviation exactly. Quartiles too while the values are few; else of a part of them."""
    for law in LAWS:
        check_spread(pool(_spread, 2, law, kept)[0], law, kept)


def check_spread(found: dict[str, float], law: str, kept: int) -> None:
    values = LAWS[law](torch.Generator().manual_seed(0)).double().flatten().numpy()
    q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
    assert found["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(values.std(ddof=1), rel=1e-9, abs=1e-12)
    if len(values) <= kept:
        assert (found["median"], found["iqr"]) == pytest.approx((median, q3 - q1), rel=1e-12, abs=1e-12)
    else:
        assert abs(found["median"] - median) <= 0.1 * (q3 - q1)
        assert found["iqr"] == pytest.approx(q3 - q1, rel=0.15, abs=1e-12)


def _evaluated(run: str, micro_batch_sizes: list[int]) -> list[dict[str, float]]:
    model = load_trained(Path(run))[0].model
    config = load_config(Path(run) / "config.yaml")
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, VOCAB)
    dataset = load_datasets(config.data, tokenizer).train  # the larger half
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = build_groups(1)
    number_metrics.BLOCK = 30  # so that 76 numbers have two blocks
    found = []
    for size in micro_batch_sizes:
        batches = EvalLoader(dataset, rank=rank, world=world, micro_batch_size=size)
        evaluator = Evaluator(model, model.kept_features, batches, groups, baseline_value=1.0)
        metrics, known = evaluator(), evaluator.factors
        assert known is not None
        metrics |= {f"edge {i}": edge for i, edge in enumerate(known.edges)} | {"numbers": float(known.n)}
        found.append(metrics | {f"{level} {i}": f for level, each in known.factors.items() for i, f in enumerate(each)})
    return found


def test_micro_batches_and_ranks_change_no_metric(pool: Pool, one_rank: Path) -> None:
    drawn = "dist/ovr_prob_sum_median_causal"  # of individuals: each rank and batch draws its own
    first, *others = (
        {name: value for name, value in found.items() if name != drawn}
        for world, sizes in ((1, [32, 16, 1]), (2, [8]), (3, [4]))
        for found in pool(_evaluated, world, str(one_rank), sizes)[0]
    )
    assert {"edge 0", "0.9 1"} <= first.keys(), "the factors of intervals are compared too"
    for other in others:
        assert other == pytest.approx(first, rel=5e-5, abs=1e-6)  # abs: a mean of either sign that cancels


@torch.no_grad()
def test_base_accuracy_equals_the_base_models_top_1(one_rank: Path, held_out: Batch) -> None:
    """Values unseen: the base reads <NUM>'s row as any other."""
    base = AutoModelForCausalLM.from_pretrained(one_rank / "base").eval()
    logits = base(input_ids=held_out.input_ids, attention_mask=held_out.attention_mask.long()).logits
    best, keep = logits.argmax(-1), held_out.labels >= 0
    surprise = torch.nn.functional.cross_entropy(logits[keep], held_out.labels[keep])
    assert metrics(one_rank)[-1]["eval/base_perplexity"] == pytest.approx(float(surprise.exp()), rel=1e-5)
    expected = float((best == held_out.labels)[keep].double().mean())
    assert json.loads((one_rank / "start.json").read_text())["base_accuracy"] == pytest.approx(expected, abs=1e-9)
    assert metrics(one_rank)[-1]["eval/base_accuracy"] == pytest.approx(expected, abs=1e-9)


DIGITS = list(range(80, 90))  # of `support.tiny`'s words


def _base_measured(numerals: list[int], kind: str = "qwen2", **of_num: Any) -> list[dict[str, float]]:
    """A tiny base's own figures on this rank: by the heads before training, and by the base's own head."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = build_groups(world)
    start, stop = vocab_range(tiny.VOCAB, groups.vocab_rank, world)
    how: dict[str, Any] = {"num_row_init": "digits", "numerals": numerals, "w_num_scale": None} if numerals else {}
    how |= of_num
    model = tiny.tiny_model(kind, start="calibrated", vocab_start=start, rows=stop - start, **how)
    batches = [tiny.random_batch(6, 16, seed=s) for s in range(4)]
    evaluator = Evaluator(
        model, model.kept_features, batches[rank::world], groups, baseline_value=None, numerals=numerals
    )
    return [evaluator.measure_base(), measure_base(tiny.tiny_base(kind), batches, tiny.NUM, numerals)]


@torch.no_grad()
def test_at_numbers_any_digit_counts_as_right_for_the_base(pool: Pool) -> None:
    """Against the base itself, which reads the digits' mean where <NUM> stands."""
    base, right, hits, surprise = tiny.tiny_base(), 0, 0, []
    table = base.get_input_embeddings().weight
    for batch in (tiny.random_batch(6, 16, seed=s) for s in range(4)):
        embeddings = table[batch.input_ids]
        embeddings[batch.input_ids == tiny.NUM] = table[DIGITS].mean(0)
        keep = batch.labels >= 0
        logits = base(inputs_embeds=embeddings, attention_mask=batch.attention_mask.long()).logits[keep].double()
        labels, best = batch.labels[keep], logits.argmax(1)
        digit = (labels == tiny.NUM) & torch.isin(best, torch.tensor(DIGITS))
        hits += int(digit.sum())
        right += int(((best == labels) | digit).sum())
        p = logits.softmax(1)
        likely = p.gather(1, labels[:, None])[:, 0]
        surprise.append(-(likely + (labels == tiny.NUM) * p[:, DIGITS].sum(1)).log())
    assert hits > 2, "no digit where a number is next: nothing is tested"
    every = torch.cat(surprise)
    expected = {"eval/base_accuracy": right / len(every), "eval/base_perplexity": float(every.mean().exp())}
    for by_heads, by_base in pool(_base_measured, 2, DIGITS):
        # one of some 200 positions may be a near tie, which rounding decides
        for found in (by_heads, by_base):
            assert found["eval/base_accuracy"] == pytest.approx(expected["eval/base_accuracy"], abs=1.5 / len(every))
            assert found["eval/base_perplexity"] == pytest.approx(expected["eval/base_perplexity"], rel=1e-4)


def test_the_bases_figure_is_the_bases_for_every_causal_size(pool: Pool) -> None:
    """Heads of C < H have only a part of the base's head, which they start from and are compared with."""
    for size in (4, 16, tiny.HIDDEN):
        for by_heads, by_base in pool(partial(_base_measured, causal_size=size), 2, DIGITS):
            assert by_heads == pytest.approx(by_base, rel=1e-4)


def test_a_base_by_itself_measures_as_in_its_run_whatever_that_starts_from(pool: Pool) -> None:
    """Without numeral tokens it is scored by <NUM>. Gemma's token table scales its rows."""
    for numerals in ([], DIGITS):
        ((by_heads, by_base),) = pool(_base_measured, 1, numerals, "gemma3_text")
        assert by_heads == pytest.approx(by_base, rel=1e-4)
    for start in ({"num_row_init": "mean"}, {"num_bias_init": 3.0}):
        for by_heads, by_base in pool(partial(_base_measured, **start), 2, []):
            assert by_heads == pytest.approx(by_base, rel=1e-4)


def test_cqwen_eval_of_the_runs_texts_equals_the_runs_evaluation(one_rank: Path) -> None:
    """The base is loaded again from its folder, and comes to what was measured before training."""
    done = cqwen_forked("eval", one_rank, "--json", "--label-set", 0.3)
    assert done.returncode == 0, done.stderr
    figures, last = json.loads(done.stdout), metrics(one_rank)[-1]
    kept = "eval/accuracy_words"  # by frequency in training, which eval does not read
    names = [name for name in last if name.startswith("eval/") and not name.startswith(kept)]
    assert {name: figures[name] for name in names} == pytest.approx({name: last[name] for name in names}, rel=1e-4)


@pytest.mark.parametrize("keep_digits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_base_is_measured_alike_by_the_run_its_evaluation_and_its_exports(one_rank, tmp_path, keep_digits) -> None:
    """One that never saw <NUM> spells numbers by digits, whatever the rows of <NUM> start from."""
    base, texts = tmp_path / "base", write_texts(tmp_path / "held_out.jsonl", 8, seed=1)
    shutil.copytree(one_rank / "base", base)
    (base / POLICY_FILE).unlink()  # which a base has that a run has taught <NUM>
    model = {"model__architecture": None, "model__tokenizer": None, "model__name_or_path": str(base)}
    stages = [{"name": "heads", "train": ["regression"], "steps": 1}]
    data = {"data__eval": str(texts), "data__eval_fraction": 0.0, "stages": stages, "data__keep_digits": keep_digits}
    found = []
    for start in ("calibrated", "seed"):
        config = write_config(tmp_path, **model, **data, start=start, run__dir=str(tmp_path / start))
        train_run(config)
        export(tmp_path / start, tmp_path / f"{start}-export")
        evaluated = evaluate_checkpoint(tmp_path / start, None)
        exported = evaluate_checkpoint(tmp_path / f"{start}-export", str(texts), base=str(base))
        found += [metrics(tmp_path / start)[-1], evaluated, exported]
    digits = evaluate_checkpoint(tmp_path / "seed-export", str(texts), base=str(one_rank / "base"))
    for name in ("eval/base_accuracy", "eval/base_perplexity"):
        assert [each[name] for each in found[1:]] == pytest.approx([found[0][name]] * 5, rel=1e-4), name
    assert digits["eval/base_perplexity"] != pytest.approx(found[0]["eval/base_perplexity"], rel=1e-2)


def test_other_texts_are_not_taken_for_the_held_out_ones(one_rank: Path, tmp_path: Path) -> None:
    """The run's file has been written again: its held-out fifth may have been trained on."""
    run, texts = tmp_path / "run", write_texts(tmp_path / "texts.jsonl", 41)
    shutil.copytree(one_rank, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(one_rank.parent / "texts.jsonl"), str(texts)))
    refused = r"data\.eval: found held-out texts other than in the checkpoint, allowed: the same, or --data FILE"
    with pytest.raises(UserError, match=refused):
        evaluate_checkpoint(run, None)
    assert evaluate_checkpoint(run, str(texts))["eval/numbers"] > 0


@torch.no_grad()
def test_metrics_of_label_sets_and_of_the_surest_words(one_rank: Path, held_out: Batch) -> None:
    """S4 3.3.2: {k: P_k > p}; 3.3.3: the 80 % that softmax finds likeliest. Against the materialised P and softmax."""
    model = load_trained(one_rank)[0].model
    with torch.no_grad():
        loc_s, scale_s, _, _ = model(held_out.input_ids, held_out.numeric_values, held_out.attention_mask)
    keep = held_out.labels >= 0
    labels = held_out.labels[keep]
    p = (0.5 + torch.atan((loc_s.double() - model.action.threshold.double()) / scale_s.double()) / math.pi)[keep]
    p = p[:, : model.config.used_rows]
    best = p.max(-1)
    in_set = float(p.quantile(0.99))
    surprise = -loc_s[keep].double().log_softmax(-1).gather(1, best.indices[:, None])[:, 0]
    done = cqwen_forked("eval", one_rank, "--json", "--label-set", in_set)
    figures, sets = json.loads(done.stdout), p > in_set
    inside = sets.gather(1, labels[:, None]).sum()
    surest = surprise.argsort(stable=True)[: round(0.8 * len(labels))]
    assert int(inside) > 0
    expected = {
        "eval/multilabel_recall": float(inside) / len(labels),
        "eval/multilabel_precision": float(inside) / int(sets.sum()),
        "eval/multilabel_f1": 2 * float(inside) / (int(sets.sum()) + len(labels)),
        "eval/multilabel_size_mean": int(sets.sum()) / len(labels),
        "eval/multilabel_empty": float((~sets.any(1)).double().mean()),
        "eval/accuracy_80": float((best.indices == labels)[surest].double().mean()),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_files_in_a_run_folder_have_the_folders_permissions(one_rank: Path) -> None:
    """Colleagues on a cluster: safetensors alone writes files that only their owner can read."""
    allowed = one_rank.stat().st_mode & 0o666
    files = [path for path in one_rank.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert [path.name for path in files if path.stat().st_mode & 0o444 != allowed & 0o444] == []


def test_evaluation_rows_are_read_by_the_fold_that_left_them_out(tmp_path: Path) -> None:
    """`eval` comes to the run's figures; the report's samples are of such a model too."""
    config = write_config(tmp_path, model__wide=64, data__eval_fraction=0.3)
    train_run(config)
    run = tmp_path / "run"
    last = metrics(run)[-1]
    found = evaluate_checkpoint(run, None)
    for name in ("eval/cls_loss_mean", "eval/reg_mdae"):
        assert found[name] == pytest.approx(last[name], rel=1e-5)


def test_an_export_is_evaluated_as_its_run_is(tmp_path: Path) -> None:
    """On texts of which the run's own keys say what is learnt, and where they are cut."""
    answers = [json.loads(line)["text"] for line in write_texts(tmp_path / "texts.jsonl", 12).read_text().splitlines()]
    turns = [[{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}] for answer in answers]
    rows = [{"said": said} for said in turns]
    texts = tmp_path / "rows.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(texts), "eval": str(texts), "sequence_length": 40, "messages_field": "said"}
    stages = [{"name": "heads", "train": ["heads"], "steps": 1}]
    train_run(write_config(tmp_path, data=data, stages=stages))
    export(tmp_path / "run", tmp_path / "out")
    own, exported = (evaluate_checkpoint(tmp_path / name, str(texts)) for name in ("run", "out"))
    assert exported == {name: pytest.approx(own[name], rel=1e-5) for name in exported}
    assert own.keys() - exported.keys() == {"eval/base_accuracy", "eval/base_perplexity"}
    assert api.evaluate(tmp_path / "out", rows) == {name: pytest.approx(own[name], rel=1e-5) for name in exported}


FIGURES = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


def watching(folder: Path) -> tuple[Path, Path]:
    """A config whose watched texts are its held-out ones under another name and others without numbers."""
    held_out = write_texts(folder / "held.jsonl", 12)
    texts = [json.loads(line)["text"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    same = folder / "same.jsonl"
    same.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    (folder / "plain.txt").write_text("we have tea\nwe have bread and tea\n", encoding="utf-8")
    watch = {"same": str(same), "plain": str(folder / "plain.txt")}
    config = write_config(
        folder, data__eval=str(held_out), data__eval_fraction=0.0, data__watch=watch, train__eval_every=2
    )
    return config, folder / "run"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of such a config."""
    config, run = watching(tmp_path_factory.mktemp("watched"))
    train_run(config)
    return run


def evaluations(run: Path) -> list[dict[str, float]]:
    start = json.loads((run / "start.json").read_text(encoding="utf-8"))["eval"]
    return [start, *(record for record in metrics(run) if "eval/accuracy" in record)]


def test_watched_texts_have_their_own_metrics_at_every_evaluation(watched: Path, tmp_path: Path) -> None:
    found = evaluations(watched)
    assert len(found) >= 4
    for figures in found:
        for name in FIGURES:
            assert figures[f"watch/same/{name}"] == figures[f"eval/{name}"]
        assert 0 <= figures["watch/plain/accuracy"] <= 1
    assert found[0]["watch/plain/cls_loss_mean"] != found[-1]["watch/plain/cls_loss_mean"]
    train_run(watched.parent / "config.yaml", "data.watch={}", f"run.dir={tmp_path}/unwatched")
    assert losses(watched) == losses(tmp_path / "unwatched"), "looking changes nothing"


def test_stages_and_the_best_checkpoint_may_use_watched_metrics(tmp_path: Path) -> None:
    config, run = watching(tmp_path)
    until = {"metric": "watch/plain/base_accuracy", "patience": 1, "max_steps": 12}
    train_run(
        config,
        f"stages.0.until={json.dumps(until)}",
        "stages.0.steps=null",
        "train.best_metric=watch/plain/cls_loss_mean",
    )
    lengths = [record["stage"] for record in metrics(run)].count("heads")
    assert lengths < 12, "the base's accuracy does not change, so the stage ends early"
    other = (f"run.dir={tmp_path}/other", "train.best_metric=watch/tea/accuracy")
    done = cqwen_forked("train", config, *other)
    assert done.returncode == 2
    assert "train.best_metric: found 'watch/tea/accuracy'" in done.stderr
    assert "watch/plain/accuracy" in done.stderr


def test_a_run_resumed_on_two_ranks_keeps_the_bases_metrics(watched: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(set_back(watched, run, 4), f"run.dir={run}", world=2)
    first, *_, last = evaluations(run)
    for name in ("same", "plain"):
        assert last[f"watch/{name}/base_accuracy"] == first[f"watch/{name}/base_accuracy"]
    assert last["watch/same/accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-9)
