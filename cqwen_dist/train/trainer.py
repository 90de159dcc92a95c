"""The training loop: batches in, optimizer steps, evaluations and checkpoints out. Read `Trainer.run` aloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.checkpoint.saving import About
from cqwen_dist.config import Config, UserError
from cqwen_dist.data.load import Datasets, load_datasets
from cqwen_dist.data.loader import Loader
from cqwen_dist.data.statistics import NumericStatistics
from cqwen_dist.model.backbone import compile_layers, load_base
from cqwen_dist.model.calibration import LEVEL_TOKENS, calibrate
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import override_start
from cqwen_dist.parallel.collectives import Stopped, gather_objects, main_rank_first, main_rank_says
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.runtime import Runtime, distributed, seed_everything
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.run.environment import write_environment
from cqwen_dist.run.files import METRICS, START, START_TENSORS, write_atomically
from cqwen_dist.run.status import RunStatus, read_status
from cqwen_dist.train.base import build_run_base, load_tokenizer
from cqwen_dist.train.constraint import Constraint
from cqwen_dist.train.evaluation.conformal import CALIBRATION
from cqwen_dist.train.evaluation.run_evaluation import Evaluations
from cqwen_dist.train.features.cache import FeatureCache
from cqwen_dist.train.session import Place, check_best_metric, open_session, run_saver, to_go_on_from
from cqwen_dist.train.stage_loaders import StageLoaders
from cqwen_dist.train.stages import Schedule, StagePlan
from cqwen_dist.train.state import collect_state, restore_state
from cqwen_dist.train.step import Stepper
from cqwen_dist.train.telemetry.alarms import Alarms, Refusals
from cqwen_dist.train.telemetry.metrics import MetricsLog, Progress
from cqwen_dist.train.telemetry.perf import Clock, of_model
from cqwen_dist.train.telemetry.writers import MetricsFile
from cqwen_dist.train.warm_start import read_warm_start
from cqwen_dist.train.zero.engine import Engine, NonFiniteStep
from cqwen_dist.train.zero.load import load_partitioned_base
from cqwen_dist.train.zero.settings import deepspeed_config

CALIBRATION_TOKENS = 512  # of all ranks together


def train(config: Config) -> dict[str, Any]:
    """Train, or go on, or find that it was done before. One call on every rank; returns the last figures.

    Raises `UserError` on every rank alike where the input is wrong, and `Stopped` where the run was told to stop and
    can be gone on with.
    """
    with StopFlag().installed() as stop, distributed(config.parallel.timeout_min * 60, stop) as runtime:
        return train_on(config, runtime)


def train_on(config: Config, runtime: Runtime) -> dict[str, Any]:
    """`train` in a process group that is up."""
    with open_session(config, runtime) as status:
        with runtime.stop.interruptible():  # nothing is lost yet
            trainer = Trainer(config, runtime, status)
        return trainer.run()


class Trainer:
    """A run on one rank. Building it reads the data and loads the model; `run` trains."""

    def __init__(self, config: Config, runtime: Runtime, status: RunStatus | None = None) -> None:
        self.config, self.runtime = config, runtime
        self.folder = Path(config.run.dir)
        self.status = status or RunStatus(self.folder, runtime.is_main)
        self.place = Place()
        self.saved_step = 0
        seed_everything(config.train.seed)
        self.groups: Groups = build_groups(config.parallel.vocab_group_size, runtime.timeout_s)
        self.progress: Progress | None = None
        self._phases = Progress(0, 0)  # what is before the first step
        self.resume_from = main_rank_says(
            lambda: to_go_on_from(config, self._say)
        )  # a damaged one is told before anything is built
        main_rank_first(lambda: build_run_base(config, self._say, runtime.device))
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        head, table, code = None, None, config.model.trust_remote_code
        read = cache(lambda: load_tokenizer(config))  # once there is a base to read it for
        if config.parallel.zero_stage == 3:
            settings = deepspeed_config(config, self.groups.world_size, 1)
            base, head, table = load_partitioned_base(
                config.base_folder, dtype, settings, runtime, code, rows_for=lambda rows: read().rows_for(rows)
            )
        else:
            how = (code, config.model.quantize, runtime.device)
            base = load_base(config.base_folder, dtype, *how, rows_for=lambda rows: read().rows_for(rows))
        tokenizer = read()
        vocab_size = base.config.vocab_size
        context = base.config.max_position_embeddings
        for key, length in config.sequence_lengths().items():
            if length > context:
                raise UserError(key, length, f"at most {context}, the base model's context")
        self.datasets: Datasets = load_datasets(config.data, tokenizer, main_rank_first)
        self.statistics: NumericStatistics = self.datasets.train.statistics(
            runtime.rank, self.groups.world_size, gather_objects
        )
        self.loaders = StageLoaders(self.datasets.train, config, runtime.rank, self.groups.world_size)
        self.schedule = Schedule(config.stages, self.loaders.steps_per_epoch)
        start, stop = vocab_range(vocab_size, self.groups.vocab_rank, self.groups.vocab_size)
        self.row_range = (start, stop)
        self.numerals = tokenizer.numeral_ids if config.num_row_init == "digits" else []
        seed_everything(config.train.seed)  # w_num, W_reg and the adapters alike on all ranks, whatever was read
        model = CausalQwenModel.from_base_model(
            base,
            start=config.start,
            head=head,
            table=table,
            num_token_id=tokenizer.num_token_id,
            used_rows=max(tokenizer.text_size, tokenizer.num_token_id + 1),
            vocab_start=start,
            rows=stop - start,
            w_num_scale=config.w_num_scale,
            b_noise_init=config.model.b_noise_init,
            num_row_init=config.num_row_init,
            numerals=self.numerals,
            num_bias_init=config.model.num_bias_init,
            reg_gain=config.model.reg_gain,
            abduction=config.model.abduction,
            causal_size=config.model.causal_size,
            number_dims=config.number_dims,
            scale_activation=config.model.scale_activation,
            scalar_threshold=config.train.thresholds == "scalar",
            target=self.statistics.transform(config.target_transform).to_dict(),
            lora=config.model.lora.model_dump() if config.trains("lora") else None,
        )
        if config.model.gradient_checkpointing:
            model.transformer.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if config.model.compile_layers:
            compile_layers(model.transformer)
        self.engine = Engine(model, config, runtime, self.groups)
        self.model = model
        self.gemm_dtype = dtype
        self.used_rows = model.config.used_rows if config.loss.negatives == "used" else None
        self.constraint = Constraint(model, config.loss.constraint, self.engine.forward)
        counts = self.datasets.train.word_counts(vocab_size)
        self.stepper = Stepper(self.engine, config, dtype, self.used_rows, self.constraint, counts)
        self.cache = FeatureCache(config, runtime, self.engine, self._forward, tokenizer, self._say)
        self.evaluations = Evaluations(
            config,
            runtime,
            self.groups,
            model,
            self._forward,
            tokenizer,
            self.datasets.eval,
            baseline_value=self.statistics.median if self.statistics.count else None,
            used_rows=self.used_rows,
            gemm_dtype=dtype,
            word_counts=counts,
            numerals=self.numerals,
            progress=self._show,
        )
        self.saver = run_saver(config, self.groups, runtime, self._say)
        self.refusals = Refusals(config.train.max_refused_steps)
        self.clock = Clock(of_model(model), runtime.device, self.groups.world_size, config.run.peak_tflops)

    # ------------------------------------------------------------------------------------- the loop

    def run(self) -> dict[str, Any]:
        """Train from where the run is to its end; returns the last figures."""
        self.runtime.stop.agreed(self.runtime.device)
        alone = self.groups.world_size == 1  # then nobody waits for this rank: a signal ends the start at once
        with self.runtime.stop.interruptible() if alone else nullcontext():
            step, last = self._start_or_resume()
        total = self.schedule.total_steps
        if step >= total:
            self._say(f"already done: {total} steps in {self.folder}")
            if self.runtime.is_main and read_status(self.folder)["status"] != "done":  # killed before it could say so
                MetricsFile(self.folder / METRICS, step).close()
                self.status.at(step, total, self.schedule.at(step).stage.name)
                self.status.write(status="done")
            return last
        log = None
        if self.runtime.is_main:
            logged = step - (self.place.due is not None)
            base = self.evaluations.base_accuracy
            alarms = Alarms.of(self.config, self.used_rows or self.model.config.vocab_size, base)
            everything = self.config.model_dump(mode="json")
            log = MetricsLog(self.folder, self.config.run, everything, logged, alarms, self._say)
            self.progress = Progress(total, step)
        self.status.at(step, total, self.schedule.at(step).stage.name)
        self.status.write(status="running")
        try:
            last = self._train_on(last, log)
        except Stopped:
            self.saver.wait()  # raises what stopped the run where that was a save
            self._say("told to stop: saving")
            if self.place.step > self.saved_step:
                self._save()
            self.saver.wait()
            self.status.write(checkpoint=self.saver.newest)
            raise
        finally:  # a run that fails has logged every step that it took
            self.loaders.close()
            self.saver.close()
            if log is not None:
                log.close()
        self.saver.wait()
        self.cache.close()
        ended = "done" if self.place.step >= self.schedule.total_steps else "paused"
        self.status.write(status=ended, eta_s=0, checkpoint=self.saver.newest)
        return last

    def _train_on(self, last: dict[str, Any], log: MetricsLog | None) -> dict[str, Any]:
        """The steps from where the run is on; returns the last figures."""
        step = self.place.step
        if (due := self.place.due) is not None:
            if log is not None:
                log.push(due)
            last = self._after_step(step, due, last, log)
        entered: StagePlan | None = None
        while step < self.schedule.total_steps:
            plan = self.schedule.at(step)
            self._move_to(step, last)
            if plan.index > self.config.last_stage:
                break  # the next command goes on from here
            if plan is not entered:
                self._enter_stage(plan, fresh=step == plan.start)
                batches = self.loaders.enter(plan)
                self.cache.enter(plan, step, self.loaders.current)
                entered = plan
            self.clock.data()
            cached = self.cache.next()  # before the loader moves on
            micro_batches = self._next(batches)
            self.clock.work(micro_batches)
            self.engine.set_lr(plan, step)
            try:
                figures, tokens = self.stepper(micro_batches, plan, step, cached)
                self.refusals.taken()
            except NonFiniteStep as error:
                loader, total = self.loaders.current, self.schedule.total_steps
                figures = dict(self.refusals.refuse(error, step + 1, total, plan.stage.name, loader, log))
                tokens = 0
            step += 1
            record = {"step": step, "stage": plan.stage.name, **figures}
            at_end = step == plan.stop
            if log is not None:
                record.update(self.engine.heads.take_figures())
                record.update(self.saver.take())
                record.update(self.clock.figures(tokens, plan.stage.groups, cached is not None))
                log.push(record, self.loaders.current.handed_out())
            if self.progress is not None:
                loss = float(figures["train/total_loss"]) if at_end and tokens else None
                self.progress.step(step, plan.stage.name, tokens, loss, force=at_end)
            last = self._after_step(step, record, last, log)
        return last

    def _after_step(
        self, step: int, record: dict[str, Any], last: dict[str, Any], log: MetricsLog | None
    ) -> dict[str, Any]:
        """Evaluate and save where it is time to; returns the last figures."""
        self.runtime.hang.alive()
        plan = self.schedule.at(step - 1)
        at_end = step == plan.stop
        self.status.at(step, self.schedule.total_steps, plan.stage.name, self.saver.newest)
        evaluated = False
        if at_end or step % self.config.train.eval_every == 0:
            self._move_to(step, last, due=record)
            last, evaluated = self._evaluate(step, log), True
            at_end = self.schedule.observe(step, last) or at_end
            if self.progress is not None:
                self.progress.total = self.schedule.total_steps
        if at_end or step % self.config.train.checkpoint_every == 0:
            if log is not None:
                log.flush()  # before the checkpoint: a run that goes on from it does not log this step again
            self._move_to(step, last, evaluated=evaluated)
            self._save()
        return last

    def _move_to(self, step: int, figures: dict[str, Any], **about: Any) -> None:
        """Where the run is from here on. about: further fields of `Place`."""
        stage = self.schedule.at(max(step - 1, 0)).stage.name
        self.place = Place(step, stage, self.loaders.state_dict(), figures, **about)

    def _next(self, batches: Iterator[list[Batch]]) -> list[Batch]:
        """The next step's micro-batches. A signal ends the waiting for them, and the other ranks are told."""
        try:
            with self.runtime.stop.interruptible():
                return next(batches)
        except Stopped:
            self.stepper.give_up(self.loaders.current.micro_steps)
            raise

    def _forward(self, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        """The engine's, outside of steps: where the ranks were told to stop, they do before it."""
        self.runtime.hang.alive()
        self.runtime.stop.agreed(self.runtime.device)
        return self.engine.forward(batch, keep)

    # ------------------------------------------------------------------------- start, stages, saving

    def _start_or_resume(self) -> tuple[int, dict[str, Any]]:
        """Load the latest checkpoint, or make the start; returns the step and the figures known so far."""
        folder = self.resume_from
        if folder is not None:
            state = load_checkpoint(folder, self.row_range)
            self._go_on_from(state, folder)
            self._say(f"going on from {folder}")
            return self.place.step, self.place.figures
        for line in (*self.datasets.lines(), *self._warnings()):
            self._say(line)
        start: dict[str, Any] = {"start": self.config.start, "statistics": self.statistics.to_dict()}
        self.evaluations.measure_base()
        if self.evaluations.base_accuracy is not None:
            start["base_accuracy"] = self.evaluations.base_accuracy
        warm = read_warm_start(self.config, self.row_range)
        if warm is not None:
            warm.apply(self.engine, self.config)
            start["warm_start"] = str(warm.source)
            self._say(f"begins with the weights of {warm.source}")
        headless = warm is None or not warm.heads
        if self.config.start == "calibrated" and headless:
            calibration = calibrate(
                self.model,
                self._calibration_batches(CALIBRATION_TOKENS),
                groups=self.groups,
                features=self._forward,
                b_noise_init=self.config.model.b_noise_init,
                used_rows=self.used_rows,
                fit_batches=self._calibration_batches(LEVEL_TOKENS),
                level=self.config.model.level_logits,
                numerals=self.numerals,
                progress=self._at,
            )
            start["calibration"] = calibration.to_dict()
            self._say(
                f"calibrated start: C {calibration.threshold:.3g}, gamma {calibration.gamma:.3g}, loss "
                f"{calibration.loss:.3f} (the seeds' start: {calibration.seed_loss:,.1f}), accuracy of argmax P "
                f"{calibration.accuracy:.1%} (base {calibration.base_accuracy:.1%}), median sum of P "
                f"{calibration.prob_sum_median:.2f}; levelled by {calibration.levelled:.0%}"
            )
            if calibration.num_f1 is not None:
                self._say(
                    f"<NUM> at the start: F1 {calibration.num_f1:.3f}, mean P where a number follows "
                    f"{calibration.num_p_mean:.2f}"
                )
            if calibration.reg_mdae is not None:
                self._say(
                    f"numbers at the start: median error {calibration.reg_mdae:.4g} where always the median has "
                    f"{calibration.reg_median_mdae:.4g} ({calibration.numbers:,} numbers, each told by the others)"
                )
        if headless:
            override_start(self.model, self.config.model.threshold_init, self.config.model.gamma_init)
            self.engine.heads.noise_unit = float(self.model.action.b_noise.abs().median()) or 1.0
        figures = self.evaluations(0, self.place.stage)
        self.schedule.check_metrics(figures)
        check_best_metric(self.config, figures)
        if self.config.loss.constraint.mode != "off":
            self.constraint.begin(self.engine.feature_state()[0], self._calibration_batches(CALIBRATION_TOKENS))
            main_rank_first(lambda: self.constraint.save(self.folder / START_TENSORS))
        start["eval"] = figures
        if self.runtime.is_main:
            write_environment(self.folder, self.groups.world_size, {"deepspeed_config": self.engine.deepspeed_config})
            write_atomically(self.folder / START, json.dumps(start, indent=1))
        return 0, figures

    def _enter_stage(self, plan: StagePlan, fresh: bool) -> None:
        """Wake and put to sleep; moments of waking groups are zeroed only where the stage truly begins."""
        self.engine.enter_stage(plan, self.schedule.woken(plan) if fresh else frozenset())
        self.constraint.features_moved = self.schedule.features_awake_by(plan)
        at_most = "at most " if plan.stage.until is not None else ""
        self._say(f"stage {plan.stage.name}: {', '.join(sorted(plan.stage.groups))}; {at_most}{plan.steps} steps")

    def _evaluate(self, step: int, log: MetricsLog | None) -> dict[str, Any]:
        figures = self.evaluations(step, self.place.stage)
        if log is not None:
            log.add(figures)
        if shown := self.evaluations.shown(figures):
            self._say(f"  evaluation at step {step}: {shown}")
        return figures

    def _save(self) -> None:
        """A checkpoint of everything that trains, and of where the run is."""
        progress = {
            **self.place.to_dict(),
            "schedule": self.schedule.state_dict(),
            "constraint": self.constraint.state_dict(),
            "norms": self.engine.usual.seen,
            **self.evaluations.state_dict(),
            "figures": {**self.place.figures, **self.evaluations.factors()},
        }
        about = About(
            self.place.step,
            self.place.stage,
            self.place.figures if self.place.evaluated else {},
            self.config.model_dump(mode="json"),
            self.config.base_folder,
        )
        self.saver.save(lambda: collect_state(self.engine, self.row_range, progress), about)
        self.saved_step = self.place.step

    def _go_on_from(self, state: TrainState, folder: Path) -> None:
        """Put a checkpoint back."""
        restore_state(self.engine, state, folder)
        self.place = Place(**{key: state.state[key] for key in Place().to_dict()})
        factors = self.place.figures.pop(CALIBRATION, None)
        self.saved_step = self.place.step
        self.schedule.load_state_dict(state.state["schedule"])
        if self.config.loss.constraint.mode != "off":
            self.constraint.load(self.folder / START_TENSORS, state.state["constraint"])
        self.engine.usual.seen = list(state.state.get("norms", []))
        self.loaders.load_state_dict(state.state["loader"])
        self.evaluations.load_state_dict(state.state, factors)

    # ---------------------------------------------------------------------------------- small parts

    def _warnings(self) -> list[str]:
        """What is allowed and is known to disappoint."""
        warnings = []
        if self.config.start == "seed-100":
            warnings.append("C = 100 begins and often ends at the uniform solution: a low loss, and no word learnt")
        if self.config.model.b_noise_init == 0:
            warnings.append(
                "b_noise = 0 has no gradient: it stays 0, and causal sampling has no noise to keep as a law"
            )
        if self.config.loss.vocab_reduction == "mean":
            size = self.model.config.vocab_size
            warnings.append(f"vocab_reduction: mean makes reg_weight weigh {size:,} times as much against the words")
        return [f"note: {warning}" for warning in warnings]

    def _calibration_batches(self, tokens: int) -> list[Batch]:
        """This rank's share of about so many tokens, the same texts on any number of ranks."""
        report = self.datasets.train.report
        samples = min(max(1, round(tokens * report.sequences / report.tokens)), report.sequences)
        loader = Loader(
            self.datasets.train,
            rank=self.runtime.rank,
            world=self.groups.world_size,
            global_batch_size=samples,
            micro_batch_size=self.config.train.micro_batch_size,
            seed=self.config.train.seed,
        )
        return next(iter(loader))

    def _at(self, what: str, done: int, of: int) -> None:
        """Between two parts of the start, on every rank: shown, and left where any rank was told to stop."""
        self.runtime.hang.alive()
        self.runtime.stop.agreed(self.runtime.device)
        self._show(what, done, of)

    def _show(self, what: str, done: int, of: int) -> None:
        if self.runtime.is_main:
            (self.progress or self._phases).part(what, done, of)

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            (self.progress or self._phases).say(text)
