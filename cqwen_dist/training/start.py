"""The start of a run: restores the latest checkpoint, or starts anew (measures the base, calibrates the heads).

A warm start (`model.warm_start`) only takes the weights of a run or checkpoint, or adapters saved by PEFT. Optimizers,
stages and data order start from scratch. The heads keep the units of their training (median and scale of the target
transform, rate unit of b_noise) and are not calibrated.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import KEYS, load_checkpoint, refuse_exchanged, refuse_strange
from cqwen_dist.config import JUDGED, Config, LoraConfig, Said, UserError
from cqwen_dist.config.shape import SHAPE_KEYS
from cqwen_dist.data.columns import columns_for
from cqwen_dist.data.loader import Loader
from cqwen_dist.heads.beside import before_beside
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.calibration import LEVEL_TOKENS, Calibration, Features, calibrate
from cqwen_dist.model.initialise import start_at_data
from cqwen_dist.ops.products import gemm_dtype
from cqwen_dist.parallel.collectives import main_rank_first
from cqwen_dist.run.files import LATEST, START, START_TENSORS, write_atomically, write_environment
from cqwen_dist.training.run_parts import Run
from cqwen_dist.training.state import Place, head_shapes, load_heads, restore, row_range, save_start
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms
from cqwen_dist.training.telemetry.metrics import MetricsLog, open_trackers

CALIBRATION_TOKENS = 512  # over all ranks
WARM = "model.warm_start"
# Field of a model's shape -> config key that sets it.
_SHAPE = {**SHAPE_KEYS, "num_token_id": "model.num_token_id", "vocab_size": WARM, "hidden_size": WARM}


def begin(run: Run) -> Place:
    """Bring a newly built run to its first or resumed step. Collective over the world. Raises `UserError`."""
    action = run.model.action
    if run.resume_from is not None:
        action.base_head = None
        place = restore(run, run.resume_from)
        if place.figures:  # later stages may have changed in the config
            refuse_unknown_metrics(run.config, place.figures)
        run.progress.say(f"resumed from {run.resume_from}")
        return place

    # A new run: its data, for people
    config, say = run.config, run.progress.say
    for line in (*run.reports, *_notes(run)):
        say(line)
    # The wide part is fitted to held-out texts too
    columns = columns_for(config.data, with_eval=True) if run.columns and run.model.config.wide else run.columns
    start: dict[str, Any] = {"start": config.start, "statistics": asdict(run.statistics), "columns": columns}

    # Metrics of the base model: now or never, since training changes it
    run.evaluations.measure_base()
    if run.evaluations.base_accuracy is not None:
        start["base_accuracy"] = run.evaluations.base_accuracy

    # The heads: from a warm start, calibrated, or with the constants of the seeds
    has_heads = False
    if config.model.warm_start is not None:
        source, has_heads = _load_warm_start(run, config.model.warm_start)
        start["warm_start"] = str(source)
        say(f"begins with the weights of {source}")
    sample, z = _sample(run)
    if not has_heads:
        if config.calibrated:
            start["calibration"] = _calibrate(run, sample, z)
        elif run.statistics.count:
            median = run.model.target.forward(torch.tensor(run.statistics.median, dtype=torch.float64))
            start_at_data(run.model, median, run.statistics.scale_of(config.target_transform))
        # b_noise's learning rate is relative to its start (`HeadOptimizer`)
        run.engine.heads.noise_unit = float(run.model.action.b_noise.abs().median()) or 1.0

    start |= _projection(run)
    action.base_head = None  # training changes the features that it fits

    # The first evaluation; an unknown metric name in the config is refused here, not after the first stage
    metrics = run.evaluations(0, "")
    refuse_unknown_metrics(config, metrics)

    # The reference for KL: the model as it is now
    if config.constraint.mode != "off":
        hidden = run.model.config.hidden_size  # the side network has been fitted since
        z = [
            run.model.with_beside(before_beside(part, hidden), batch, batch.kept)
            for part, batch in zip(z, sample, strict=True)
        ]
        run.constraint.begin(run.engine.feature_state()[0], z)
        main_rank_first(lambda: save_start(run.constraint, run.folder / START_TENSORS))

    def write() -> None:
        write_environment(run.folder, run.groups.world_size, {"deepspeed_config": run.engine.deepspeed_config})
        write_atomically(run.folder / START, json.dumps({**start, "eval": metrics}, indent=1))

    main_rank_first(write)
    return Place(0, run.schedule.at(0).stage.name, run.loaders.state_dict(), metrics, evaluated=bool(metrics))


def open_log(run: Run, place: Place, on_record: Callable[[Mapping[str, Any]], None]) -> MetricsLog:
    """The metrics log with alarms, of rank 0. Drops metrics that were logged after `place`."""
    config = run.config
    alarms = Alarms(
        None if config.loss.class_weights is not None else run.model.config.vocab_size,
        base_accuracy=run.evaluations.base_accuracy,
        kl_held=config.constraint.mode == "dual",
    )
    logged = place.step - (place.due is not None)
    run.progress.begin(run.schedule.total_steps, place.step)
    trackers = open_trackers(run.folder, config.run, config.model_dump(mode="json"), logged)
    log = MetricsLog(run.folder, logged, alarms, run.progress.say, on_record, trackers)
    if logged == 0 and place.figures:
        log.start(run.schedule.at(0).stage.name, place.figures)
    if place.exchanged:
        names = ", ".join(KEYS[name] for name in place.exchanged)
        log.alarm(Alarm(place.step, "exchanged-inputs", f"the run goes on with another {names}, as run.accept allows"))
    return log


def _features(run: Run, loader: Loader) -> Features:
    """A function that returns z of the loader's first step. It reads the first stage's feature cache, built here."""
    return run.cache.reader(run.schedule.at(0), run.loaders.current, loader) or run.forward


def _projection(run: Run) -> dict[str, float]:
    """What model.causal_size leaves out of the base, told and for start.json; {} for nothing."""
    error, of = run.model.action.projection_error, "logits" if run.config.calibrated else "head"
    if not error:
        return {}
    size = run.model.action.word_size
    run.progress.say(f"model.causal_size {size} leaves out {error:.1%} of the base's {of}, by norm")
    return {"projection_error": error}


@torch.no_grad()
def _sample(run: Run) -> tuple[list[Batch], list[Tensor]]:
    """This rank's share of the texts that choose (C, gamma) and measure U's spread for KL, and z of each batch."""
    loader = run.calibration_loader(CALIBRATION_TOKENS)
    features, z = _features(run, loader), []
    batches = [batch.to(run.runtime.device) for batch in next(iter(loader))]
    for i, batch in enumerate(batches):
        run.at("features", i, len(batches))
        z.append(features(batch, batch.kept))
    return batches, z


def _calibrate(run: Run, sample: list[Batch], z: list[Tensor]) -> dict[str, Any]:
    """Calibrate the heads (`model.calibration`) on a sample and its z, and tell the result."""
    loader = run.calibration_loader(LEVEL_TOKENS, run.config.model.start_numbers)
    known = iter(z)
    found = calibrate(
        run.model,
        sample,
        groups=run.groups,
        features=lambda batch, keep: next(known),
        fit_features=_features(run, loader),
        fit_batches=next(iter(loader)),
        beside_batches=_held_out(run),
        numerals=run.words.numerals if run.config.num_row_init == "digits" else (),
        law="cauchy" if run.config.model.own_head else run.config.model.number_head,
        progress=run.at,
    )
    run.engine.heads.candidate_unit /= found.size
    say = run.progress.say
    if run.config.learns_words:
        _say_words(found, say)
    if found.reg_mdae is not None:
        say(
            f"numbers at the start: median error {found.reg_mdae:.4g}, always predicting the median "
            f"{found.reg_median_mdae:.4g} ({found.numbers:,} numbers, each predicted by a fit to the others); "
            f"their law: {found.law}"
        )
    return asdict(found)


def _held_out(run: Run) -> Iterator[tuple[Batch, Tensor]]:
    """The held-out batches, which the side network also learns from, with features before their numbers."""
    held_out = run.evaluations.held_out if run.model.config.wide else None
    for batch in () if held_out is None else held_out.batches:
        batch = batch.to(run.runtime.device)
        at = batch.number_places
        yield batch, run.forward(batch, at) if run.model.config.depths else torch.zeros(len(at), 0)


def _say_words(found: Calibration, say: Callable[[str], None]) -> None:
    say(
        f"calibrated start: C {found.threshold:.3g}, gamma {found.gamma:.3g}, loss "
        f"{found.loss:.3f} (the seeds' start: {found.seed_loss:,.1f}), accuracy of argmax P "
        f"{found.accuracy:.1%} (base {found.base_accuracy:.1%}), median sum of P "
        f"{found.prob_sum_median:.2f}; levelled by {found.levelled:.0%}; word temperature {found.word_temperature:,.0f}"
    )
    if found.num_f1 is not None:
        say(f"<NUM> at the start: F1 {found.num_f1:.3f}, mean P before a number {found.num_p_mean:.2f}")


def _notes(run: Run) -> Iterator[str]:
    """Warnings about settings that are valid but known to work badly."""
    asked = run.stepper.options.gemm_dtype
    if run.config.start == "seed-100":
        yield "note: C = 100 starts at the uniform solution and often stays there: low loss, no word learnt"
    if gemm_dtype(asked, run.runtime.device) != asked:
        yield "note: this CPU has no bf16 instructions: train.precision=fp32 is several times as fast"


def _load_warm_start(run: Run, given: str) -> tuple[Path, bool]:
    """Load the weights of `model.warm_start`. Returns (their folder, whether they include the heads).

    Collective. Raises `UserError` if they do not fit, and for pickle files.
    """
    config, engine, path = run.config, run.engine, Path(given).expanduser()
    if not path.is_dir() and path.name != LATEST:
        raise UserError(WARM, str(path), "the folder of a run, of a checkpoint, or of an adapter that PEFT saved")

    # Only adapters, or adapters, w_num, <NUM> row and heads (this rank's rows) of a checkpoint
    heads: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    if (path / adapter.CONFIG).is_file():
        adapter.refuse_lora_changes(path, LoraConfig(**(run.model.config.lora or config.model.lora.model_dump())))
        features = adapter.read_adapter(path)
    else:
        _, path = resolve_checkpoint(path)
        saved = load_checkpoint(path, row_range(run.model), [])
        features, heads, state = saved.features, {**saved.heads, **saved.rows}, saved.state

    # Check everything before loading anything: a refused start must leave the model unchanged
    if adapter.to_peft(features) and not config.trains("lora"):
        allowed = "weights without adapters, as no stage trains lora (`cqwen export --merge` folds them into a base)"
        raise UserError(WARM, Said(f"adapters in {path}"), allowed)
    inputs = {name: run.inputs[name] for name in ("tokenizer", "base")}
    refuse_exchanged(state.get("inputs", {}), inputs, config.run.accept, path)
    if state:
        _refuse_shape(config, run.model.config, state["model"], path)
    refuse_strange(features, engine.feature_shapes(), path, key=WARM, dtype=None, all_of_them=False)
    if heads:
        refuse_strange(heads, head_shapes(engine), path, key=WARM)
        load_heads(engine, heads, state)
    # A warm start takes weights only: moments stay those of the new engine
    begun = engine.feature_state()
    engine.load_feature_state(begun._replace(parameters={**begun.parameters, **features}))
    return path, bool(heads)


def _refuse_shape(config: Config, ours: Any, saved: dict[str, Any], source: Path) -> None:
    theirs = type(ours).from_dict(saved)
    for name, key in _SHAPE.items():
        if getattr(ours, name) != getattr(theirs, name):
            raise UserError(key, getattr(ours, name), f"{getattr(theirs, name)!r}, as in {source}")
    unit = TargetTransform(**saved["target"]).name
    if unit != config.target_transform:
        raise UserError("loss.target_transform", config.target_transform, f"{unit!r}, as in {source}")
    law, asked = saved["target"].get("law", "cauchy").partition("-")[0], config.model.number_head
    if asked not in (None, "auto", law) and config.model.own_head is None:
        raise UserError("model.number_head", asked, f"{law}, as in {source}")
    if ours.lora is not None and theirs.lora is not None:
        for name, value in theirs.lora.items():
            if name != "dropout" and ours.lora.get(name) != value:  # it only affects training
                raise UserError(f"model.lora.{name}", ours.lora.get(name), f"{value!r}, as in {source}")


def refuse_unknown_metrics(config: Config, metrics: Mapping[str, Any]) -> None:
    """Raises `UserError` by key if the config names a metric that is not among an evaluation's."""
    named = {f"stages.{i}.until.metric": s.until.metric for i, s in enumerate(config.stages) if s.until is not None}
    if metrics:
        named["train.best_metric"] = config.best_metric
    for key, metric in named.items():
        if metric not in metrics:
            known = ", ".join(sorted(name for name in metrics if name.startswith(JUDGED)))
            raise UserError(key, metric, f"a metric of an evaluation: {known}")
