"""The training loop: optimizer steps, evaluations and checkpoints. Start reading at `Trainer.train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cqwen_dist.batch import Batch
from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.config.schema import Config
from cqwen_dist.parallel.collectives import Stopped, from_main_rank
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.parallel.stop import StopFlag
from cqwen_dist.run.files import CHECKPOINTS, METRICS
from cqwen_dist.run.status import RunStatus, read_status
from cqwen_dist.training.assembly import Run, build_run
from cqwen_dist.training.callbacks import Callback, Callbacks, TrainResult
from cqwen_dist.training.replicas import RanksDiffer
from cqwen_dist.training.session import open_session
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.start import begin, open_log
from cqwen_dist.training.state import Place, restore, save
from cqwen_dist.training.telemetry.alarms import Alarm, Refusals
from cqwen_dist.training.telemetry.metrics import MetricsFile, MetricsLog
from cqwen_dist.training.telemetry.perf import Clock, work_of
from cqwen_dist.training.zero.engine import NonFiniteStep


def train(
    config: Config, callbacks: Sequence[Callback] = (), write_inputs: Callable[[], None] = lambda: None
) -> TrainResult:
    """Train or resume a run. Returns at once if the run is done. All ranks call it.

    write_inputs: as in `open_session`. Raises `UserError` on all ranks for wrong input, and `Stopped` if a signal
    stopped the run; the run can be resumed.
    """
    with StopFlag().installed() as stop, distributed(config.parallel.timeout_min * 60, stop) as runtime:
        metrics = train_on(config, runtime, callbacks, write_inputs)
        folder = Path(config.run.dir)
        ended = from_main_rank(lambda: read_status(folder))
    newest = ended.get("checkpoint")
    checkpoint = None if newest is None else folder / CHECKPOINTS / newest
    metrics = {name: float(value) for name, value in metrics.items()}
    step, reason = ended.get("step", 0), ended.get("reason")
    return TrainResult(folder, ended["status"], step, metrics, checkpoint, reason, runtime.rank)


def train_on(
    config: Config,
    runtime: Runtime,
    callbacks: Sequence[Callback] = (),
    write_inputs: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`train` in an existing process group; returns the last evaluation's metrics."""
    with open_session(config, runtime, write_inputs) as status:
        with runtime.stop.interruptible():  # no progress yet that a checkpoint should save
            run = build_run(config, runtime)
        called = Callbacks(callbacks if runtime.is_main else (), run.folder, runtime.stop, run.schedule)
        try:
            return Trainer(run, status, called).train()
        finally:
            run.progress.close()


class Trainer:
    """Trains a run on this rank from its current place to the end."""

    def __init__(self, run: Run, status: RunStatus, callbacks: Callbacks) -> None:
        config, runtime = run.config, run.runtime
        self.run, self.status, self.callbacks = run, status, callbacks
        self.place = Place()
        self.saved_step = 0
        self.log: MetricsLog | None = None  # of rank 0
        self.refusals = Refusals()
        self.clock = Clock(work_of(config, run.model), runtime.device, run.groups.world_size)

    def train(self) -> dict[str, Any]:
        """Start or resume, and train to the end. Returns the metrics of the last evaluation."""
        run, stop = self.run, self.run.runtime.stop
        # Building the run was interruptible: agree on a stop once before the first long collective
        with stop.excusing_lost_ranks():
            stop.agreed(run.runtime.device)
        alone = run.groups.world_size == 1  # no other rank waits, so a signal may end the start at once
        # Restore the checkpoint, or calibrate the heads and evaluate step 0
        with stop.interruptible() if alone else nullcontext():
            self.place = begin(run)
        self.saved_step = self.place.step
        if self.place.step >= run.schedule.total_steps and self.place.due is None:
            return self._already_done()
        self.log = open_log(run, self.place, self.callbacks.step)
        self._write_status("running")
        reason = None
        # The steps. A stop request raises `Stopped` on all ranks before the same step, and all save there.
        try:
            if run.config.train.checkpoint_start and run.resume_from is None:
                self._move_to(0, evaluated=bool(self.place.figures))
                self._save()
            if self.place.step == 0 and self.place.figures:
                self.callbacks.tell("on_evaluation", 0, self.place.stage, self.place.figures)
            self._take_steps()
        except Stopped:
            self._save_on_stop()
            reason = self.callbacks.agreed()
            if reason is None:  # a signal: the caller reports it; a callback's stop returns normally
                raise
        finally:  # a failed run also logs all of its steps
            run.loaders.close()
            run.saver.close()
            if self.log is not None:
                self.log.close()
        # The last checkpoint must be on the disk before status.json names it
        run.saver.wait()
        run.cache.close()
        self.callbacks.checkpoints(self.place.step, self.place.stage, run.saver.whole)
        self.callbacks.agreed()
        ended = "done" if self.place.step >= run.schedule.total_steps else "paused"
        self.status.write(status=ended, eta_s=0, checkpoint=run.saver.newest, reason=reason)
        return self.place.figures

    def _take_steps(self) -> None:
        """Run `_loop`. If copies differ between ranks, replay from the last checkpoint."""
        while True:
            try:
                self._loop()
                return
            except RanksDiffer as found:
                self._go_back(found)

    def _loop(self) -> None:
        """Take steps to the end of the run, or to the end of this command's last stage."""
        run, step = self.run, self.place.step
        if (due := self.place.due) is not None:  # the previous command stopped during the evaluation of this step
            if self.log is not None:
                self.log.push(due)
            self._after_step(step, due)
        entered = -1  # index of the current stage
        while step < run.schedule.total_steps:
            plan = run.schedule.at(step)  # asked at each step: an evaluation may end a stage early
            self._move_to(step)
            if plan.index > run.config.last_stage:
                break  # the next command continues from here
            if plan.index != entered:
                batches = self._enter_stage(plan, step)
                entered = plan.index
            record = self._take_step(plan, step, batches)
            step += 1
            self._after_step(step, record)

    def _enter_stage(self, plan: StagePlan, step: int) -> Iterator[list[Batch]]:
        """Start or resume a stage at a step. Returns its batches."""
        run = self.run
        run.enter_stage(plan, fresh=step == plan.start)
        at_most = "at most " if plan.stage.until is not None else ""
        groups = ", ".join(sorted(plan.stage.groups))
        run.progress.say(f"stage {plan.stage.name}: {groups}; {at_most}{plan.steps} steps")
        if plan.steps <= plan.stage.warmup_steps:
            run.progress.say(f"  all of them are warm-up (warmup_steps {plan.stage.warmup_steps}): lr is not reached")
        batches = run.loaders.enter(plan)
        run.cache.enter(plan, step, run.loaders.current)
        if not self.callbacks.asked:  # after a callback's stop request the stage does not start
            self.callbacks.tell("on_stage_start", step, plan.stage.name)
        return batches

    def _take_step(self, plan: StagePlan, step: int, batches: Iterator[list[Batch]]) -> dict[str, Any]:
        """Take one optimizer step, or refuse it if it is not finite. Returns its record."""
        run, loader = self.run, self.run.loaders.current
        self.clock.data()
        cached = run.cache.next()  # before `_next`: it reads the loader's position, which `_next` advances
        micro_batches = self._next(batches)
        self.clock.work(micro_batches)
        run.engine.set_lr(plan, step)
        try:
            metrics, tokens = run.stepper(micro_batches, plan, step, cached)
            self.refusals.taken()
        except NonFiniteStep as error:
            total = run.schedule.total_steps
            metrics = dict(self.refusals.refuse(error, step + 1, total, plan.stage.name, loader, self._alarm))
            tokens = 0
        record = {"step": step + 1, "stage": plan.stage.name, **metrics}
        if self.log is not None:  # `push` writes the record of the step before, so this step is not waited for
            record |= run.engine.heads.metrics() | run.saver.take()
            record |= self.clock.metrics(tokens, plan.stage.groups, cached is not None)
            before = self.log.push(record, loader.handed_out())
            at_end = step + 1 == plan.stop
            shown = {name: float(value) for name, value in record.items() if "/" in name} if at_end else before or {}
            run.progress.step(step + 1, plan.stage.name, tokens, shown, force=at_end)
        return record

    def _next(self, batches: Iterator[list[Batch]]) -> list[Batch]:
        """The micro-batches of the next step. A signal ends the wait, and this rank then tells all others."""
        try:
            with self.run.runtime.stop.interruptible():
                return next(batches)
        except Stopped:
            self.run.stepper.give_up(self.run.loaders.current.micro_steps)
            raise

    def _after_step(self, step: int, record: dict[str, Any]) -> None:
        """Compare copies, evaluate and save, as far as they are due after this step."""
        run, train = self.run, self.run.config.train
        run.runtime.hang.alive()
        plan = run.schedule.at(step - 1)
        self.status.at(step, run.schedule.total_steps, plan.stage.name, run.saver.newest)
        self._move_to(step)
        at_end = step == plan.stop
        saves = at_end or step % train.checkpoint_every == 0
        self._check_ranks(step, due=saves)  # before the save: a corrupt copy must not reach a checkpoint
        if at_end or step % train.eval_every == 0:
            self._move_to(step, due=record)  # if a signal ends the evaluation, a resumed run repeats it
            metrics = self._evaluate(step)
            self._move_to(step, figures=metrics, evaluated=True)
            at_end = run.schedule.observe(step, metrics) or at_end
            run.progress.total = run.schedule.total_steps
        if saves or at_end:
            if not saves:  # the evaluation ended the stage
                self._check_ranks(step, due=True)
            if self.log is not None:
                self.log.flush()  # before the checkpoint, since a run resumed from it does not log this step again
            self._save()
        self.callbacks.checkpoints(step, self.place.stage, run.saver.whole)
        if at_end:
            self.callbacks.tell("on_stage_end", step, self.place.stage)

    def _check_ranks(self, step: int, due: bool) -> None:
        """Compare the copies on all ranks if due. Raises `RanksDiffer`."""
        if passing_fault := self.run.replicas.check(step, due):
            self._alarm(Alarm(step, "ranks-differ", passing_fault))

    def _go_back(self, found: RanksDiffer) -> None:
        """Return to the last checkpoint after copies differed. Raises `found` if there is none, or after a replay."""
        run = self.run
        run.loaders.close()
        run.saver.wait()
        folder = from_main_rank(lambda: latest_checkpoint(run.folder))
        if folder is None or found.again:
            raise found
        if self.log is not None:
            self.log.close()
        self.place = restore(run, folder)
        self.saved_step = self.place.step
        self.log = open_log(run, self.place, self.callbacks.step)
        text = f"after step {found.step}: {found}; the steps after {self.place.step} are taken again"
        self._alarm(Alarm(self.place.step, "ranks-differ", text))

    def _alarm(self, alarm: Alarm) -> None:
        if self.log is not None:
            self.log.alarm(alarm)

    def _evaluate(self, step: int) -> dict[str, Any]:
        evaluations = self.run.evaluations
        metrics = evaluations(step, self.place.stage)
        if self.log is not None:
            self.log.add(metrics)
            self.log.flush()  # no extra synchronisation: the evaluation has waited for this step
        if metrics:
            self.callbacks.tell("on_evaluation", step, self.place.stage, metrics)
        if shown := evaluations.shown(metrics):
            self.run.progress.say(f"  evaluation at step {step}: {shown}")
        return metrics

    def _move_to(self, step: int, **fields: Any) -> None:
        """Set the place of the run. fields: fields of `Place`; without `figures` the last metrics are kept."""
        stage = self.run.schedule.at(max(step - 1, 0)).stage.name
        self.place = Place(step, stage, self.run.loaders.state_dict(), **{"figures": self.place.figures, **fields})

    def _save(self) -> None:
        save(self.run, self.place)
        self.saved_step = self.place.step

    def _save_on_stop(self) -> None:
        self.run.saver.wait()  # if a failed save stopped the run, its error is raised here
        self.run.progress.say("told to stop: saving")
        if self.log is not None:
            self.log.flush()
        if self.place.step > self.saved_step:
            self._check_ranks(self.place.step, due=True)
            self._save()
        self.run.saver.wait()
        self.status.write(checkpoint=self.run.saver.newest)

    def _already_done(self) -> dict[str, Any]:
        run = self.run
        run.progress.say(f"already done: {run.schedule.total_steps} steps in {run.folder}")
        if run.runtime.is_main and read_status(run.folder)["status"] != "done":  # killed before it wrote the status
            MetricsFile(run.folder / METRICS, self.place.step).close()  # drops a truncated last line
            self._write_status("done")
        return self.place.figures

    def _write_status(self, status: str) -> None:
        schedule, step = self.run.schedule, self.place.step
        self.status.at(step, schedule.total_steps, schedule.at(step).stage.name)
        self.status.write(status=status)
