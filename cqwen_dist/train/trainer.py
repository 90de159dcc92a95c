"""The training loop: batches in, optimizer steps, evaluations and checkpoints out. Read `Trainer.run` aloud."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.manifest import latest_checkpoint, write_atomically
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, save_checkpoint
from cqwen_dist.checkpoint.status import read_status, write_status
from cqwen_dist.config import Config, UserError
from cqwen_dist.data.dataset import Datasets, load_datasets
from cqwen_dist.data.loader import EvalLoader, Loader
from cqwen_dist.data.statistics import NumericStatistics, numeric_statistics
from cqwen_dist.model.backbone import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import calibrate
from cqwen_dist.parallel.collectives import main_rank_first
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.runtime import Runtime, distributed, seed_everything
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.train.base import build_run_base, load_tokenizer
from cqwen_dist.train.deepspeed_config import deepspeed_config
from cqwen_dist.train.engine import Engine, NonFiniteStep
from cqwen_dist.train.evaluate import Evaluator
from cqwen_dist.train.metrics import METRICS, MetricsFile, MetricsLog, Progress
from cqwen_dist.train.partitioned import load_partitioned_base
from cqwen_dist.train.run_folder import START, open_run, write_environment
from cqwen_dist.train.stages import Schedule, StagePlan
from cqwen_dist.train.state import collect_state, restore_state
from cqwen_dist.train.step import Stepper

CALIBRATION_TOKENS = 512  # of all ranks together


def train(config: Config) -> dict[str, Any]:
    """Train, or go on, or find that it was done before. One call on every rank; returns the last figures.

    Raises `UserError` on every rank alike where the input is wrong.
    """
    with distributed(config.parallel.timeout_min * 60) as runtime:
        return train_on(config, runtime)


def train_on(config: Config, runtime: Runtime) -> dict[str, Any]:
    """`train` in a process group that is up."""
    opened = False
    try:
        main_rank_first(lambda: open_run(config))
        opened = True
        return Trainer(config, runtime).run()
    except BaseException as error:
        if runtime.is_main and opened:
            write_status(Path(config.run.dir), "fatal", reason=f"{type(error).__name__}: {error}")
        raise


class Trainer:
    """A run on one rank. Building it reads the data and loads the model; `run` trains."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.folder = Path(config.run.dir)
        seed_everything(config.train.seed)
        self.groups: Groups = build_groups(config.parallel.vocab_group_size, runtime.timeout_s)
        self.progress: Progress | None = None
        main_rank_first(lambda: latest_checkpoint(self.folder))  # a damaged one is told before anything is built
        main_rank_first(lambda: build_run_base(config, self._say, runtime.device))
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        head = None
        if config.parallel.zero_stage == 3:
            settings = deepspeed_config(config, self.groups.world_size, 1)
            code = config.model.trust_remote_code
            base, head = load_partitioned_base(config.base_folder, dtype, settings, runtime, code)
        else:
            base = load_base(config.base_folder, dtype, config.model.trust_remote_code)
        vocab_size = base.config.vocab_size
        context = base.config.max_position_embeddings
        if config.data.sequence_length > context:
            raise UserError(
                "data.sequence_length", config.data.sequence_length, f"at most {context}, the base model's context"
            )
        tokenizer = load_tokenizer(config, vocab_size)
        self.datasets: Datasets = load_datasets(config.data, tokenizer)
        self.statistics: NumericStatistics = numeric_statistics(self.datasets.train.target_values())
        self.loader = self._loader()
        self.schedule = Schedule(config.stages, self.loader.steps_per_epoch)
        start, stop = vocab_range(vocab_size, self.groups.vocab_rank, self.groups.vocab_size)
        self.row_range = (start, stop)
        seed_everything(config.train.seed)  # w_num, W_reg and the adapters alike on all ranks, whatever was read
        model = CausalQwenModel.from_base_model(
            base,
            start=config.start,
            head=head,
            num_token_id=tokenizer.num_token_id,
            used_rows=max(tokenizer.text_size, tokenizer.num_token_id + 1),
            vocab_start=start,
            rows=stop - start,
            w_num_scale=config.model.w_num_scale,
            b_noise_init=config.model.b_noise_init,
            num_row_init=config.model.num_row_init,
            num_bias_init=config.model.num_bias_init,
            causal_size=config.model.causal_size,
            number_dims=config.number_dims,
            scale_activation=config.model.scale_activation,
            scalar_threshold=config.train.thresholds == "scalar",
            target=self.statistics.transform(config.target_transform).to_dict(),
            lora=config.model.lora.model_dump() if config.trains("lora") else None,
        )
        if config.model.gradient_checkpointing:
            model.transformer.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.engine = Engine(model, config, runtime, self.groups)
        self.model = model
        self.gemm_dtype = dtype
        self.used_rows = model.config.used_rows if config.loss.negatives == "used" else None
        self.stepper = Stepper(self.engine, config, dtype, self.used_rows)
        self.evaluator = self._evaluator()

    # ------------------------------------------------------------------------------------- the loop

    def run(self) -> dict[str, Any]:
        """Train from where the run is to its end; returns the last figures."""
        began = time.monotonic()
        step, last = self._start_or_resume()
        total = self.schedule.total_steps
        if step >= total:
            self._say(f"already done: {total} steps in {self.folder}")
            if self.runtime.is_main and read_status(self.folder)["status"] != "done":  # killed before it could say so
                MetricsFile(self.folder / METRICS, step).close()
                write_status(self.folder, "done", step=step, total_steps=total)
            return last
        log = None
        if self.runtime.is_main:
            log = MetricsLog(self.folder, self.config.run, self.config.model_dump(mode="json"), step)
            self.progress = Progress(total, step)
            write_status(self.folder, "running", step=step, total_steps=total)
        try:
            last = self._train_on(step, last, log)
        finally:  # a run that fails has logged every step that it took
            if log is not None:
                log.close()
        if self.runtime.is_main:
            write_status(self.folder, "done", step=total, total_steps=total, seconds=round(time.monotonic() - began, 1))
        return last

    def _train_on(self, step: int, last: dict[str, Any], log: MetricsLog | None) -> dict[str, Any]:
        """The steps from `step` on; returns the last figures."""
        total = self.schedule.total_steps
        batches = iter(self.loader)
        entered: StagePlan | None = None
        while step < total:
            plan = self.schedule.at(step)
            if plan is not entered:
                self._enter_stage(plan, fresh=step == plan.start)
                entered = plan
            micro_batches = next(batches)
            self.engine.set_lr(plan, step)
            try:
                figures, tokens = self.stepper(micro_batches, plan, step)
            except NonFiniteStep as error:
                raise NonFiniteStep(f"step {step + 1}, stage {plan.stage.name}: {error}; it changed nothing") from error
            step += 1
            loss = None
            if log is not None:
                log.push({"step": step, "stage": plan.stage.name, **figures})
            at_end = step == plan.stop
            if self.progress is not None:
                loss = float(figures["train/total_loss"]) if at_end else None
                rate = self.progress.step(step, plan.stage.name, tokens, loss, force=at_end)
                if log is not None:
                    log.add({"perf/tokens_per_s": rate})
            if at_end or step % self.config.train.eval_every == 0:
                last = self._evaluate(step, log)
            if at_end or step % self.config.train.checkpoint_every == 0:
                if log is not None:
                    log.flush()  # before the checkpoint: a run that goes on from it does not log this step again
                self._save(step, plan, last)
                if log is not None:
                    write_status(self.folder, "running", step=step, total_steps=total)
        return last

    # ------------------------------------------------------------------------- start, stages, saving

    def _start_or_resume(self) -> tuple[int, dict[str, Any]]:
        """Load the latest checkpoint, or make the start; returns the step and the figures known so far."""
        folder = latest_checkpoint(self.folder, check=False)  # rank 0 did
        if folder is not None:
            state = load_checkpoint(folder, self.row_range)
            self._go_on_from(state)
            self._say(f"going on from {folder}")
            return int(state.state["step"]), dict(state.state["figures"])
        for line in (*self.datasets.lines(), *self._warnings()):
            self._say(line)
        start: dict[str, Any] = {"start": self.config.start, "statistics": self.statistics.to_dict()}
        if self.evaluator is not None:
            start["base_accuracy"] = self.evaluator.measure_base()
        if self.config.start == "calibrated":
            calibration = calibrate(
                self.model,
                self._calibration_batches(),
                groups=self.groups,
                features=self.engine.forward,
                b_noise_init=self.config.model.b_noise_init,
                used_rows=self.used_rows,
            )
            start["calibration"] = calibration.to_dict()
            self._say(
                f"calibrated start: C {calibration.threshold:.3g}, gamma {calibration.gamma:.3g}, loss "
                f"{calibration.loss:.3f} (the seeds' start: {calibration.seed_loss:,.1f}), accuracy of argmax P "
                f"{calibration.accuracy:.1%} (base {calibration.base_accuracy:.1%}), median sum of P "
                f"{calibration.prob_sum_median:.2f}"
            )
        self.engine.heads.noise_unit = float(self.model.action.b_noise.abs().median()) or 1.0
        figures = self.evaluator() if self.evaluator is not None else {}
        start["eval"] = figures
        if self.runtime.is_main:
            write_environment(self.folder, self.groups.world_size, {"deepspeed_config": self.engine.deepspeed_config})
            write_atomically(self.folder / START, json.dumps(start, indent=1))
        return 0, figures

    def _enter_stage(self, plan: StagePlan, fresh: bool) -> None:
        """Wake and put to sleep; moments of waking groups are zeroed only where the stage truly begins."""
        self.engine.enter_stage(plan, self.schedule.woken(plan) if fresh else frozenset())
        self._say(f"stage {plan.stage.name}: {', '.join(sorted(plan.stage.groups))}; {plan.steps} steps")

    def _evaluate(self, step: int, log: MetricsLog | None) -> dict[str, Any]:
        if self.evaluator is None:
            return {}
        figures = self.evaluator()
        if log is not None:
            log.add(figures)
        shown = [f"accuracy {figures['eval/accuracy']:.1%} (base {figures.get('eval/base_accuracy', 0):.1%})"]
        shown.append(f"<NUM> F1 {figures['eval/num_f1']:.3f}")
        if "eval/reg_mdae" in figures:
            shown.append(f"MdAE {figures['eval/reg_mdae']:.4g}")
        if "eval/baseline_mdae" in figures:
            shown.append(f"always the median's {figures['eval/baseline_mdae']:.4g}")
        self._say(f"  evaluation at step {step}: {', '.join(shown)}")
        return figures

    def _save(self, step: int, plan: StagePlan, figures: dict[str, Any]) -> None:
        """A checkpoint of everything that trains, and of where the run is."""
        progress = {
            "step": step,
            "stage": plan.stage.name,
            "loader": self.loader.state_dict(),
            "figures": figures,
            "base_accuracy": None if self.evaluator is None else self.evaluator.base_accuracy,
        }
        state = collect_state(self.engine, self.row_range, progress)
        save_checkpoint(self.folder, step, state, self.groups, self.config.train.keep_checkpoints)

    def _go_on_from(self, state: TrainState) -> None:
        """Put a checkpoint back."""
        restore_state(self.engine, state)
        self.loader.load_state_dict(state.state["loader"])
        if self.evaluator is not None:
            self.evaluator.base_accuracy = state.state["base_accuracy"]

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
        return [f"[yellow]note:[/] {warning}" for warning in warnings]

    def _calibration_batches(self) -> list[Batch]:
        """This rank's share of about CALIBRATION_TOKENS tokens, the same texts on any number of ranks."""
        report = self.datasets.train.report
        samples = max(1, round(CALIBRATION_TOKENS * report.sequences / report.tokens))
        return next(iter(self._loader(samples)))

    def _loader(self, global_batch_size: int | None = None) -> Loader:
        return Loader(
            self.datasets.train,
            rank=self.runtime.rank,
            world=self.groups.world_size,
            global_batch_size=global_batch_size or self.config.train.global_batch_size,
            micro_batch_size=self.config.train.micro_batch_size,
            seed=self.config.train.seed,
        )

    def _evaluator(self) -> Evaluator | None:
        if self.datasets.eval is None:
            return None
        batches = EvalLoader(
            self.datasets.eval,
            rank=self.runtime.rank,
            world=self.groups.world_size,
            micro_batch_size=self.config.train.micro_batch_size,
        )
        return Evaluator(
            self.model,
            self.engine.forward,
            batches,
            self.groups,
            baseline_value=self.statistics.median if self.statistics.count else None,
            used_rows=self.used_rows,
            gemm_dtype=self.gemm_dtype,
        )

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            (self.progress or Progress(0, 0)).say(text)
