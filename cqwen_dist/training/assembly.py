"""Assembles a run: `build_training` makes model, engine and stepper; `build_run` adds data, evaluation, checkpoints.

The trainer, the benchmark rig and the tests all use these functions, so they measure and test the real training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cqwen_dist.checkpoint.manifest import Retention, choose_checkpoint, finish_renames
from cqwen_dist.checkpoint.mirror import Mirror
from cqwen_dist.checkpoint.resume import KEYS
from cqwen_dist.checkpoint.saving import Saver
from cqwen_dist.config import Config, UserError, rises
from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.custom import find_custom
from cqwen_dist.config.shape import ARITHMETIC
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.heads.abduction import abduction_named
from cqwen_dist.heads.fused_loss import LossOptions, gate_named
from cqwen_dist.heads.targets import NumericStatistics
from cqwen_dist.model.base_loading import base_config, find_bitsandbytes, load_base
from cqwen_dist.model.calibration import Features
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.layers import run_layers_as
from cqwen_dist.ops.ovr.head import TermOptions
from cqwen_dist.ops.ovr.loss import OvrOptions
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.parallel.collectives import from_main_rank, main_rank_first
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.mappings import over_sequence
from cqwen_dist.parallel.runtime import Runtime, seed_everything
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.run.files import EVALUATIONS
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.evaluation.evaluator import Evaluator
from cqwen_dist.training.features.cache import KEPT, FeatureCache, KeptFeatures
from cqwen_dist.training.frequency import class_weights
from cqwen_dist.training.inputs import build_run_base, read_texts, read_tokenizer
from cqwen_dist.training.replicas import Replicas
from cqwen_dist.training.run_parts import Base, Evaluations, Run, StageLoaders, Training, Words
from cqwen_dist.training.shared import KeptZ, Shared
from cqwen_dist.training.stages import Schedule
from cqwen_dist.training.step import Stepper
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.zero.engine import Engine, EngineSettings
from cqwen_dist.training.zero.partitioned_base import load_partitioned_base
from cqwen_dist.training.zero.patches import join_deepspeed
from cqwen_dist.training.zero.settings import deepspeed_config


def build_training(
    config: Config,
    runtime: Runtime,
    groups: Groups,
    base: Base,
    words: Words,
    steps_per_epoch: int | Sequence[int],
    target: dict[str, Any] | None = None,
) -> Training:
    """Build model, engine and stepper on a loaded base model. Collective over the world. Raises `UserError`.

    steps_per_epoch: one number for all stages, or one per stage. target: the unit of numbers as a dict; None: raw.
    """
    # Again, as only rank 0 may have drawn numbers to build the base: w_num, W_reg and the adapters must start equal
    seed_everything(config.train.seed)
    start, stop = vocab_range(base.model.config.vocab_size, groups.vocab_rank, groups.vocab_size)
    model = CausalQwenModel.from_base_model(
        base.model,
        start=config.start,
        head=base.head,
        table=base.table,
        num_token_id=words.num_token_id,
        used_rows=words.used_rows,
        vocab_start=start,
        rows=stop - start,
        w_num_scale=config.w_num_scale,
        num_row_init=config.num_row_init,
        numerals=words.numerals,
        line_ends=words.line_ends,
        symbols=words.symbols,
        digit_rows=words.digit_rows,
        constants=words.constants,
        target=target,
        lora=config.model.lora.model_dump() if config.trains("lora") else None,
        **config.model_shape(),
    )
    run_layers_as(model.transformer, config)
    if groups.sequence is not None:
        model.features.backbone.spread = over_sequence(groups.sequence)
    settings = engine_settings(config, groups.world_size, model.config.base["model_type"])
    engine = Engine(model, settings, runtime.device, groups, runtime.timeout_s)
    constraint = Constraint(model, config.constraint, engine.forward, engine.feature_shapes(), config.kl_bounded)
    loss, action = config.loss, model.action
    weights = class_weights(loss, words.counts, action.vocab_start, action.rows, model.config.vocab_size)
    weights = None if weights is None else weights.to(action.cls_weight.device)
    options = LossOptions(
        num_token_id=words.num_token_id,
        gate=gate_named(loss.gate),
        gemm_dtype=dtype_of(config.train.precision),
        ovr=OvrOptions(weights, terms=TermOptions(**config.word_terms)),
        words=config.learns_words,
    )
    stepper = Stepper(engine, constraint, config.loss, options, config.train.seed, lambda: runtime.stop.reason)
    replicas, schedule = Replicas(engine, groups), Schedule(config.stages, steps_per_epoch)
    return Training(config, runtime, groups, model, engine, constraint, stepper, replicas, schedule, words)


def groups_of(config: Config, runtime: Runtime) -> Groups:
    """All process groups of a run, DeepSpeed's too. Collective over the world. Raises `UserError`.

    Called while no rank may leave, on a signal or by an error: torch waits in the store for each rank of a new group.
    """
    parallel = config.parallel
    groups = build_groups(parallel.vocab_group_size, runtime.timeout_s, parallel.sequence_group_size)
    join_deepspeed()
    return groups


def build_run(config: Config, runtime: Runtime, groups: Groups, shared: Shared | None = None) -> Run:
    """Read the data, load the model, assemble the run. Collective over the world. Raises `UserError`.

    shared: of the runs of this process; None: there is one run.
    """
    # Refuse impossible settings before the slow parts
    abduction_named(config.model.abduction, config.run.dir)
    find_bitsandbytes(config.model.quantize)
    if config.model.own_head is not None:
        find_custom("model.number_head", config.model.own_head, config.run.dir)
    gate_named(config.loss.gate, config.run.dir)

    # The run folder: finish an interrupted change, and choose the checkpoint; a damaged one is refused
    seed_everything(config.train.seed)
    folder = Path(config.run.dir)
    shared = shared or Shared(folder)
    progress = Progress(not runtime.is_main, shared.called(config))
    from_main_rank(lambda: finish_renames(folder))
    resume_from, note = from_main_rank(lambda: choose_checkpoint(folder, config.run.resume))
    if note:
        progress.say(f"note: {note}")

    # The base. Ranks agree on it before it is loaded: under ZeRO-3 even that is a collective.
    name, train, model = config.base_folder, config.train, config.model
    main_rank_first(lambda: build_run_base(config, progress.say, runtime.device, shared.folder))
    for note in config.fit_to(base_config(name, model.trust_remote_code).model_type):
        progress.say(f"note: {note}")
    tokenizer, weights = read_tokenizer(config, resume_from, shared.folder)
    tokenizer = shared.once(("tokenizer", repr(config.policy)), lambda: tokenizer)  # which has read its vocabulary
    base = _base_of(config, runtime, shared, tokenizer.rows_for)
    config.fit_sizes(base.model.config.to_dict())

    # Read the data, and the word counts and tokens that the model needs
    as_read = (repr(config.data), repr(config.policy))
    (datasets, watched), samples = shared.once(("texts", *as_read), lambda: read_texts(config.data, tokenizer))
    statistics = from_main_rank(datasets.train.statistics)
    if not (config.learns_words or statistics.count):
        raise UserError("loss.words", "none", "ovr: no text of data.train has a number to learn")
    loaders = StageLoaders(datasets.train, config.batch_shapes(), train.seed, groups.reading)
    computes = config.candidates == ARITHMETIC
    words = Words(
        tokenizer.num_token_id,
        used_rows=max(tokenizer.text_size, tokenizer.num_token_id + 1),
        counts=datasets.train.word_counts(base.model.config.vocab_size),
        numerals=tokenizer.numeral_ids if config.spells_numbers else (),
        line_ends=tokenizer.line_end_ids,
        symbols=tokenizer.symbols if computes else None,
        constants=statistics.common if computes else (),
        digit_rows=tokenizer.digit_rows,
    )
    # Digests of the inputs: a resumed run compares them and refuses or reports a difference
    inputs = {name: (weights | samples)[key] for name, key in KEYS.items()}
    of_z = {name: inputs[name] for name in ("base", "tokenizer")}
    of_z["quantize"] = model.quantize

    # Model, engine and stepper, and the parts around the steps
    target = asdict(statistics.transform(config.target_transform))
    training = build_training(config, runtime, groups, base, words, loaders.steps_per_epoch, target)
    best = Retention(train.keep_checkpoints, 1, config.best_metric, higher=rises(config.best_metric))
    url = config.run.mirror if runtime.is_main else None
    mirror = None if url is None else Mirror(url, folder, progress.say)
    return Run(
        **vars(training),
        folder=folder,
        resume_from=resume_from,
        texts=datasets.train,
        reports=datasets.lines(),
        columns=datasets.reading.columns,
        statistics=statistics,
        loaders=loaders,
        inputs=inputs,
        cache=FeatureCache(train.feature_cache, shared, runtime, training.engine, training.forward, of_z, progress),
        evaluations=_evaluations(training, datasets.eval, watched, statistics, progress, shared),
        # A failed save stops the run at the next step
        saver=Saver(folder, groups, best, on_failure=runtime.stop.ask, say=progress.say, mirror=mirror),
        progress=progress,
    )


def _base_of(config: Config, runtime: Runtime, shared: Shared, rows_for: Callable[[int], int]) -> Base:
    """The base as the ranks read it."""
    name, model = config.base_folder, config.model
    if config.parallel.zero_stage == 3:
        return Base(*shared.base(lambda: load_partitioned_base(name, config, runtime, rows_for)))
    how = dtype_of(config.train.precision), model.trust_remote_code, model.quantize, runtime.device
    return Base(*shared.base(lambda: (load_base(name, *how, rows_for),)))


def _evaluations(
    training: Training,
    held_out: TextDataset | None,
    watched: Mapping[str, TextDataset],
    statistics: NumericStatistics,
    progress: Progress,
    shared: Shared,
) -> Evaluations:
    config, runtime, groups, words = training.config, training.runtime, training.groups, training.words
    how = config.model.model_dump(include={"attention", "compile_layers"})
    as_run = (repr(how), config.train.micro_batch_size)

    def evaluator(dataset: TextDataset, forward: Features, word_counts: np.ndarray | None = None) -> Evaluator:
        size = config.train.micro_batch_size
        numbers = dataset.report.tokens // groups.world_size * training.model.config.feature_size
        fits = numbers * training.stepper.options.gemm_dtype.itemsize <= KEPT
        keeps = fits and config.train.feature_cache.mode != "never"
        # Columns of the side network belong to one run
        kept = KeptZ if config.model.wide else partial(shared.kept, training.engine, (as_run, dataset.digest()))
        return Evaluator(
            training.model,
            forward,
            EvalLoader(dataset, None, micro_batch_size=size, **groups.reading),
            groups,
            baseline_value=statistics.median if statistics.count else None,
            gemm_dtype=training.stepper.options.gemm_dtype,
            word_counts=word_counts,
            kept=KeptFeatures(forward, training.check_stop, training.engine, kept) if keeps else None,
            numerals=words.numerals,
            progress=progress.part,
        )

    # The side network was also fitted to the held-out texts: treat them like training texts
    of_base = config.model.model_dump(include={"causal_size", "attention", "compile_layers", "wide", "abduction"})
    measured = (repr(of_base), config.start, repr(config.data), config.train.micro_batch_size)
    return Evaluations(
        None if held_out is None else evaluator(held_out, training.forward, words.counts),
        {name: evaluator(dataset, training.forward_held_out) for name, dataset in watched.items()},
        Path(config.run.dir) / EVALUATIONS if runtime.is_main else None,
        lambda name, measure: shared.once(("base's measures", name, *measured), measure),
    )


def engine_settings(config: Config, world_size: int, model_type: str) -> EngineSettings:
    """The engine settings for `world_size` ranks. model_type: of the base."""
    train = config.train
    return EngineSettings(
        trained=config.trained,
        weight_decay=train.weight_decay,
        max_grad_norm=config.max_grad_norm,
        bf16=train.precision == "bf16",
        zero_stage=config.parallel.zero_stage,
        offload=config.parallel.offload == "optimizer",
        outside=architecture(model_type).outside,
        deepspeed=partial(deepspeed_config, config, world_size),
    )
