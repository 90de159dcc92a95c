"""The training loop: batches in, optimizer steps, evaluations and checkpoints out. Read `Trainer.run` aloud."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.manifest import latest_checkpoint, write_atomically
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, save_checkpoint
from cqwen_dist.checkpoint.status import read_status, write_status
from cqwen_dist.config import Config
from cqwen_dist.data.dataset import Datasets, load_datasets
from cqwen_dist.data.loader import EvalLoader, Loader
from cqwen_dist.data.statistics import NumericStatistics, numeric_statistics
from cqwen_dist.model.backbone import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import calibrate
from cqwen_dist.model.losses import LossTerms, fused_loss
from cqwen_dist.parallel.collectives import gather_rows, main_rank_first, sum_over
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.runtime import Runtime, distributed, seed_everything
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_topk, vocab_range
from cqwen_dist.train.base import build_run_base, load_tokenizer
from cqwen_dist.train.deepspeed_config import deepspeed_config
from cqwen_dist.train.engine import Engine, NonFiniteStep
from cqwen_dist.train.evaluate import Evaluator
from cqwen_dist.train.metrics import METRICS, MetricsFile, MetricsLog, Progress
from cqwen_dist.train.partitioned import load_partitioned_base
from cqwen_dist.train.run_folder import START, open_run, write_environment
from cqwen_dist.train.stages import Schedule, StagePlan

ACCURACY_EVERY = 10  # steps between looks at train/accuracy, which costs two GEMMs the loss does not need
ACCURACY_TOKENS = 256  # tokens of a rank that it looks at
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


@dataclass(frozen=True)
class StepCounts:
    """What all ranks bring to one optimizer step, known before it begins."""

    words: float  # denominator of L_cls
    numbers: float  # denominator of L_reg
    tokens: int  # input positions, for tokens/s
    kept: list[list[int]]  # [micro-batch][rank of the vocabulary group]: kept positions


class Trainer:
    """A run on one rank. Building it reads the data and loads the model; `run` trains."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.folder = Path(config.run.dir)
        seed_everything(config.train.seed)
        self.groups: Groups = build_groups(config.parallel.vocab_group_size, runtime.timeout_s)
        self.progress: Progress | None = None
        main_rank_first(lambda: latest_checkpoint(self.folder))  # a damaged one is told before anything is built
        main_rank_first(lambda: build_run_base(config, self._say))
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        head = None
        if config.parallel.zero_stage == 3:
            settings = deepspeed_config(config, self.groups.world_size, 1)
            code = config.model.trust_remote_code
            base, head = load_partitioned_base(config.base_folder, dtype, settings, runtime, code)
        else:
            base = load_base(config.base_folder, dtype, config.model.trust_remote_code)
        vocab_size = base.config.vocab_size
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
            lora=config.model.lora.model_dump() if self._trains_lora() else None,
        )
        if config.model.gradient_checkpointing:
            model.transformer.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.engine = Engine(model, config, runtime, self.groups)
        self.model = model
        self.gemm_dtype = dtype
        self.used_rows = model.config.used_rows if config.loss.negatives == "used" else None
        self.class_weights = self._class_weights()
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
                figures, tokens = self._step(micro_batches, plan, step)
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

    def _step(self, micro_batches: list[Batch], plan: StagePlan, step: int) -> tuple[dict[str, Any], int]:
        """One optimizer step; returns its figures (tensors, not yet read) and the input tokens of all ranks."""
        torch.manual_seed((self.config.train.seed * 1_000_003 + step) * 4099 + self.runtime.rank)  # dropout's
        reg_weight = self.config.loss.reg_weight if plan.stage.reg_weight is None else plan.stage.reg_weight
        keeps = [batch.label_mask.flatten().nonzero()[:, 0] for batch in micro_batches]
        counts = self._exchange(micro_batches, keeps)
        sums = torch.zeros(5, device=self.runtime.device)
        right = None
        for i, (batch, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
            last = i == len(micro_batches) - 1
            there, keep = batch.to(self.runtime.device), keep.to(self.runtime.device)
            z = self.engine.forward(there, keep)
            terms = self._loss(z, there, keep, counts, counts.kept[i], reg_weight)
            self.engine.backward(terms.loss, last)
            num_label = (there.labels.flatten()[keep] == self.model.config.num_token_id).float()
            p_num = (terms.p_num * num_label).sum()
            sums += torch.stack([terms.cls_sum, terms.reg_sum, terms.prob_sum.sum(), p_num, num_label.sum()])
            if last and (step % ACCURACY_EVERY == 0 or step == plan.stop - 1):
                right = self._accuracy(z, there, keep)
        norm = self.engine.step()
        cls_sum, reg_sum, prob_sum, p_num, num_labels = sum_over(sums)
        cls_mean = cls_sum / max(counts.words, 1)
        reg_mean = reg_sum / max(counts.numbers, 1)
        figures = {
            "train/total_loss": cls_mean + reg_weight * reg_mean,
            "train/cls_loss_mean": cls_mean,
            "train/reg_loss_effective": reg_mean,
            "train/prob_sum_mean": prob_sum / max(sum(map(sum, counts.kept)), 1),
            "train/p_num_mean": p_num / num_labels.clamp(min=1),
            "train/grad_norm": norm,
            "train/lr": plan.stage.lr * plan.factor(step),
        }
        if right is not None:
            hits, seen = sum_over(right)
            figures["train/accuracy"] = hits / seen.clamp(min=1)
        return figures, counts.tokens

    def _loss(
        self, z: Tensor, batch: Batch, keep: Tensor, counts: StepCounts, kept: list[int], reg_weight: float
    ) -> LossTerms:
        """The fused loss of one micro-batch, weighted so that the ranks' average is the global mean."""
        loss, world = self.config.loss, self.groups.world_size
        labels = batch.labels.flatten()[keep]
        return fused_loss(
            self.model.action,
            self.model.abduction(z),
            labels,
            self.model.target.forward(batch.numeric_labels.flatten()[keep]),
            batch.numeric_mask.flatten()[keep],
            token_weight=world / max(counts.words, 1),
            number_weight=reg_weight * world / max(counts.numbers, 1),
            num_token_id=self.model.config.num_token_id,
            group=self.groups.vocab,
            token_counts=kept,
            gemm_dtype=self.gemm_dtype,
            alpha=loss.alpha,
            gate=loss.gate,
            gate_grad=loss.gate_grad,
            class_weights=self.class_weights,
            impl=loss.impl,
            vocab_reduction=loss.vocab_reduction,
            used_rows=self.used_rows,
        )

    def _exchange(self, micro_batches: list[Batch], keeps: list[Tensor]) -> StepCounts:
        """Counts over all ranks and micro-batches, from the CPU's copies: one small all-gather a step."""
        soft = self.config.loss.gate == "soft"
        attended = self.config.loss.cls_denominator == "attention"
        kept = [keep.numel() for keep in keeps]
        words = sum(int(b.attention_mask.sum()) for b in micro_batches) if attended else sum(kept)
        numbers = sum(kept) if soft else sum(int(b.numeric_mask.sum()) for b in micro_batches)
        tokens = sum(int(b.attention_mask.sum()) for b in micro_batches)
        mine = torch.tensor([words, numbers, tokens, *kept], device=self.runtime.device)
        table = gather_rows(mine).tolist()
        totals = [sum(row[k] for row in table) for k in range(3)]
        first = self.runtime.rank - self.groups.vocab_rank  # vocabulary groups are consecutive ranks
        group = table[first : first + self.groups.vocab_size]
        return StepCounts(totals[0], totals[1], totals[2], [[row[3 + i] for row in group] for i in range(len(kept))])

    @torch.no_grad()
    def _accuracy(self, z: Tensor, batch: Batch, keep: Tensor) -> Tensor:
        """[right, seen] of argmax P over some of the last micro-batch's tokens."""
        some = slice(0, ACCURACY_TOKENS)
        action = self.model.action
        u = action.word_part(action.add_noise(self.model.abduction(z.detach()[some])))
        _, ids = vocab_parallel_topk(
            u.loc.to(self.gemm_dtype),
            u.scale.to(self.gemm_dtype),
            action.cls_weight,
            action.cls_bias,
            action.threshold,
            1,
            group=self.groups.vocab,
            vocab_start=action.vocab_start,
            used_rows=self.used_rows,
        )
        labels = batch.labels.flatten()[keep][some]
        return torch.stack([(ids[:, 0] == labels).sum().float(), torch.full((), labels.numel(), device=z.device)])

    # ------------------------------------------------------------------------- start, stages, saving

    def _start_or_resume(self) -> tuple[int, dict[str, Any]]:
        """Load the latest checkpoint, or make the start; returns the step and the figures known so far."""
        folder = latest_checkpoint(self.folder, check=False)  # rank 0 did
        if folder is not None:
            state = load_checkpoint(folder, self.row_range)
            self._load(state)
            self._say(f"going on from {folder}")
            return int(state.state["step"]), dict(state.state["figures"])
        for line in self.datasets.lines():
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
            shown.append(f"MdAE {figures['eval/reg_mdae']:.4g} (median's {figures['eval/baseline_mdae']:.4g})")
        self._say(f"  evaluation at step {step}: {', '.join(shown)}")
        return figures

    def _save(self, step: int, plan: StagePlan, figures: dict[str, Any]) -> None:
        """A checkpoint of everything that trains."""
        parameters, moments, feature_steps = self.engine.feature_state()
        head_moments, head_steps = self.engine.heads.moments()
        by_rows = {m.name for m in self.engine.heads.members if m.spread == "rows"}
        state = TrainState(
            features=parameters,
            feature_moments=moments,
            heads={},
            head_moments={},
            rows={},
            row_moments={},
            row_range=self.row_range,
            state={
                "step": step,
                "stage": plan.stage.name,
                "loader": self.loader.state_dict(),
                "feature_steps": feature_steps,
                "head_steps": head_steps,
                "noise_unit": self.engine.heads.noise_unit,
                "figures": figures,
                "base_accuracy": None if self.evaluator is None else self.evaluator.base_accuracy,
                "model": self.model.config.to_dict(),
            },
        )
        for name, tensor in self._head_tensors().items():
            (state.rows if name in by_rows or _is_rows(name, tensor) else state.heads)[name] = tensor
        for name, tensor in head_moments.items():
            (state.row_moments if name.rpartition(".")[0] in by_rows else state.head_moments)[name] = tensor
        save_checkpoint(self.folder, step, state, self.groups, self.config.train.keep_checkpoints)

    def _load(self, state: TrainState) -> None:
        """Put a checkpoint back."""
        tensors = self._head_tensors()
        with torch.no_grad():
            for name, value in {**state.heads, **state.rows}.items():
                tensors[name].copy_(value)
        self.engine.heads.load_moments({**state.head_moments, **state.row_moments}, state.state["head_steps"])
        self.engine.load_feature_state(state.features, state.feature_moments, state.state["feature_steps"])
        self.engine.heads.noise_unit = state.state["noise_unit"]
        self.loader.load_state_dict(state.state["loader"])
        self.model.config.scale_floor = self.model.abduction.scale_floor = state.state["model"]["scale_floor"]
        if self.evaluator is not None:
            self.evaluator.base_accuracy = state.state["base_accuracy"]

    def _head_tensors(self) -> dict[str, Tensor]:
        """Every parameter of the heads by name, frozen ones too (a calibrated C may be fixed)."""
        parts = {"abduction": self.model.abduction, "action": self.model.action}
        return {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}

    # ---------------------------------------------------------------------------------- small parts

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

    def _class_weights(self) -> Tensor | None:
        """[rows] of this rank's words; words not named weigh 1."""
        named = self.config.loss.class_weights
        if named is None:
            return None
        start, stop = self.row_range
        weights = torch.ones(stop - start, device=self.runtime.device)
        for word, weight in named.items():
            if start <= word < stop:
                weights[word - start] = weight
        return weights

    def _trains_lora(self) -> bool:
        return any("lora" in stage.groups for stage in self.config.stages)

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            (self.progress or Progress(0, 0)).say(text)


def _is_rows(name: str, tensor: Tensor) -> bool:
    """Whether a head's parameter has a row for each word (also one that is frozen)."""
    return name in ("action.cls_weight", "action.cls_bias") or (name == "action.threshold" and tensor.ndim == 1)
