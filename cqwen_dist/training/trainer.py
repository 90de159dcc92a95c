"""The training loop: optimizer steps, evaluations and checkpoints. Start reading at `Trainer.turns`."""

from collections.abc import Generator, Iterator
from typing import Any

from cqwen_dist.batch import Batch
from cqwen_dist.parallel.collectives import Stopped, agree, from_main_rank
from cqwen_dist.run.files import PROFILE
from cqwen_dist.run.status import RunStatus
from cqwen_dist.training.callbacks import Callbacks
from cqwen_dist.training.run_parts import Run
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.state import Place, save
from cqwen_dist.training.telemetry.alarms import Alarm, Refusals
from cqwen_dist.training.telemetry.metrics import MetricsLog
from cqwen_dist.training.telemetry.profile import StepProfile
from cqwen_dist.training.telemetry.progress import Clock
from cqwen_dist.training.zero.engine import NonFiniteStep


class Trainer:
    """Trains a run on this rank from its current place to the end."""

    def __init__(
        self, run: Run, status: RunStatus, callbacks: Callbacks, place: Place, clock: Clock, log: MetricsLog | None
    ) -> None:
        """place: where the run starts or continues. log: on rank 0."""
        self.run, self.status, self.callbacks, self.place, self.clock = run, status, callbacks, place, clock
        self.log = log
        self.saved_step = place.step
        self.refusals = Refusals()
        window = None if log is None else run.config.train.profile
        self.profile = StepProfile(window, run.folder / PROFILE, run.runtime.device.type == "cuda", run.progress.say)

    def turns(self) -> Generator["Trainer", None, dict[str, Any]]:
        """Train to the end of the run, or of this command's last stage, a step a turn: other runs of the process train
        in between (`training.together`). Yields itself. Returns the metrics of the last evaluation."""
        run, reason = self.run, None
        try:
            if run.model.config.wide and run.resume_from is None:
                self._save()  # the closed form by itself may be the best
            if self.place.step == 0 and self.place.figures:
                self.callbacks.tell("on_evaluation", 0, self.place.stage, dict(self.place.figures))
            yield from self._take_steps()
        # All ranks raise it before the same step, and all save there
        except Stopped:
            self._save_on_stop()
            reason = self.callbacks.agreed()
            if reason is None:  # a signal: the caller reports it; a callback's stop returns normally
                raise
        # The last checkpoint must be on the disk before status.json names it
        else:
            run.saver.settle()
        # A failed run also logs all of its steps
        finally:
            run.loaders.close()
            run.saver.close()
            if self.log is not None:
                self._tell_mirror(self.log)
                self.log.close()
            self.profile.close()
        run.cache.close()
        self.callbacks.checkpoints(self.place.step, self.place.stage, run.saver.whole)
        self.callbacks.agreed()
        ended = "done" if self.place.step >= run.schedule.total_steps else "paused"
        self.status.write(status=ended, eta_s=0, checkpoint=run.saver.newest, reason=reason)
        return self.place.figures

    def _take_steps(self) -> Generator["Trainer", None, None]:
        """Take steps to the end of the run, or of this command's last stage. All ranks see the same order of events."""
        run, every = self.run, self.run.config.train
        due = self.place.due  # the record of a step whose evaluation a signal ended: only the evaluation is repeated
        step = self.place.step - (due is not None)
        entered = -1  # index of the current stage
        while step < run.schedule.total_steps:
            plan = run.schedule.at(step)  # asked at each step: an evaluation may end a stage early
            if due is None:
                # A stage starts or is resumed; the next command continues after this command's last stage
                if plan.index > run.config.last_stage:
                    return
                if plan.index != entered:
                    batches = self._enter_stage(plan, step)
                    entered = plan.index
                # Batches, optimizer step, record
                with self.profile.around(step + 1):
                    record = self._take_step(plan, step, batches)
            else:
                record, due = due, None
                if self.log is not None:
                    self.log.push(record)
            step += 1

            # The place after the step: here a stop request saves
            run.runtime.hang.alive()
            self.status.at(step, run.schedule.total_steps, plan.stage.name, run.saver.newest, run.progress.left_s)
            self.place = Place(step, plan.stage.name, run.loaders.state_dict(), self.place.figures)
            at_end = step == plan.stop
            saves = at_end or step % every.checkpoint_every == 0

            # Compare copies before the save: a corrupt copy must not reach a checkpoint
            run.replicas.check(step, due=saves)

            # Evaluate. If a signal ends the evaluation, the place has the record, and a resumed run repeats it.
            if at_end or step % every.eval_every == 0:
                self.place.due = record
                self.place.figures = metrics = self._evaluate(step)
                self.place.due, self.place.evaluated = None, True
                at_end = run.schedule.observe(step, metrics) or at_end
                run.progress.total = run.schedule.total_steps
                self.status.write(total_steps=run.schedule.total_steps)

            # Save. The log is written first: a run resumed from this checkpoint does not log this step again.
            if saves or at_end:
                if not saves:  # the evaluation ended the stage
                    run.replicas.check(step, due=True)
                if self.log is not None:
                    self.log.flush()
                self._save()
            self.callbacks.checkpoints(step, plan.stage.name, run.saver.whole)
            if at_end:
                self.callbacks.tell("on_stage_end", step, plan.stage.name)
            yield self

    def _enter_stage(self, plan: StagePlan, step: int) -> Iterator[list[Batch]]:
        run = self.run
        run.enter_stage(plan, fresh=step == plan.start)
        steps = plan.steps if plan.stage.until is None else f"at most {plan.steps}"
        run.progress.say(f"stage {plan.stage.name}: {', '.join(sorted(plan.stage.groups))}; {steps} steps")
        if plan.steps <= plan.stage.warmup_steps:
            run.progress.say(f"  all of them are warm-up (warmup_steps {plan.stage.warmup_steps}): lr is not reached")
        batches = run.loaders.enter(plan)
        now = {f"stages.{plan.index}": f"{plan.stage!r} {plan.start} {plan.stop}", "step": str(step)}
        now["data.train"] = run.texts.digest()
        agree(lambda: (None, now))
        run.cache.enter(plan, step, run.loaders.current)
        if not self.callbacks.asked:  # after a callback's stop request the stage does not start
            self.callbacks.tell("on_stage_start", step, plan.stage.name)
        return batches

    def _take_step(self, plan: StagePlan, step: int, batches: Iterator[list[Batch]]) -> dict[str, Any]:
        """Take one optimizer step, or refuse it if it is not finite. Returns its record."""
        run, loader = self.run, self.run.loaders.current
        run.cache.fill()
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
            alarm = (lambda alarm: None) if self.log is None else self.log.alarm
            metrics, tokens = self.refusals.refuse(error, step + 1, total, plan.stage.name, loader, alarm), 0
        record = {"step": step + 1, "stage": plan.stage.name, **metrics}
        if self.log is not None:  # `push` writes the record of the step before, so this step is not waited for
            self._tell_mirror(self.log)
            record |= run.saver.take()
            record |= self.clock.metrics(tokens, plan.stage.groups, cached is not None)
            before = self.log.push(record, loader.handed_out())
            at_end = step + 1 == plan.stop
            shown = {name: float(value) for name, value in record.items() if "/" in name} if at_end else before or {}
            run.progress.step(step + 1, plan.stage.name, tokens, shown, force=at_end)
        return record

    def _tell_mirror(self, log: MetricsLog) -> None:
        for name, failure in self.run.saver.mirror_news():
            self.status.mirrored(name if failure is None else None)
            if failure is not None:
                log.alarm(Alarm(self.place.step, "not-mirrored", failure))

    def _next(self, batches: Iterator[list[Batch]]) -> list[Batch]:
        """The micro-batches of the next step. A signal ends the wait, and this rank then tells all others."""
        try:
            with self.run.runtime.stop.interruptible():
                return next(batches)
        except Stopped:
            self.run.stepper.give_up(self.run.loaders.current.micro_steps)
            raise

    def _evaluate(self, step: int) -> dict[str, Any]:
        evaluations = self.run.evaluations
        found = evaluations(step, self.place.stage)
        metrics = from_main_rank(lambda: found)  # CPUs of other kinds may round otherwise, and a stage may end by it
        if self.log is not None:
            self.log.add(metrics)
            self.log.flush()  # no extra synchronisation: the evaluation has waited for this step
        if metrics:
            self.callbacks.tell("on_evaluation", step, self.place.stage, dict(metrics))
        if shown := evaluations.shown(metrics):
            self.run.progress.say(f"  evaluation at step {step}: {shown}")
        return metrics

    def _save(self) -> None:
        save(self.run, self.place)
        self.saved_step = self.place.step

    def _save_on_stop(self) -> None:
        self.run.saver.wait()  # if a failed save stopped the run, its error is raised here
        self.run.progress.say("signal to stop: saving")
        if self.log is not None:
            self.log.flush()
        if self.place.step > self.saved_step:
            self.run.replicas.check(self.place.step, due=True)
            self._save()
        self.run.saver.wait()
        self.status.write(checkpoint=self.run.saver.newest)
        self.run.saver.settle()
