"""Alarms for the user: runs that do not learn although the loss looks good, and refused steps.

Rank 0 checks each record once its values are on the host, so no step waits. An alarm is raised once, and again only
after its cause has disappeared.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from cqwen_dist.data.loader import Loader
from cqwen_dist.training.zero.engine import NonFiniteStep

SHOWN_SAMPLES = 64


@dataclass(frozen=True)
class Alarm:
    """One alarm: the step, a short name, a text for the user, and the samples of the step if known."""

    step: int
    kind: str
    text: str
    samples: list[int] = field(default_factory=list)


@dataclass
class Alarms:
    """Watches the records of a run."""

    words: int | None  # number of words in the loss; None with class weights, which change the level of the loss
    base_accuracy: float | None = None  # top-1 of the base model, if known
    _: KW_ONLY
    kl_held: bool = False  # whether the loss keeps KL below its bound

    TRAP_LOOKS = 3  # consecutive values of train/accuracy, for a pretrained base
    UNTAUGHT_LOOKS = 30  # the same for an untrained base, whose training starts at the uniform solution
    UNTAUGHT = 0.1  # a base with a lower top-1 counts as untrained
    KL_LOOKS = 2  # consecutive measurements of a held KL above its bound: batches scatter; otherwise one
    HISTORY = 64  # number of losses to compare a spike with
    LEAST_HISTORY = 20
    SPIKE = 10.0  # robust deviations
    JUMP = 3.0  # nats of the number loss, from a stage's last steps to the next one's first
    FIRST_STEPS = 20  # of a stage

    def __post_init__(self) -> None:
        self.uniform = None if self.words is None else 1.0 + math.log(self.words)
        self.untaught = self.base_accuracy is not None and self.base_accuracy < self.UNTAUGHT
        self.poor = max(0.02, 0.2 * (self.base_accuracy or 0.0))
        self._stage: str | None = None
        self._raised: set[str] = set()
        self._trapped = self._beyond = 0
        self._losses: deque[float] = deque(maxlen=self.HISTORY)
        self._number_losses: deque[float] = deque(maxlen=self.FIRST_STEPS)
        self._before: float | None = None  # the number loss at the end of the previous stage
        self._left = self._jumped = 0  # steps of a stage's beginning that are left; those with a jump

    def look(self, record: Mapping[str, Any], samples: Sequence[int] = ()) -> list[Alarm]:
        """Alarms from the plain values of one step. samples: the samples of the step on all ranks."""
        if record.get("stage") != self._stage:  # lambda, batch size or length may differ, and so may the loss
            self._stage = record.get("stage")
            self._losses.clear()
            self._before = statistics.median(self._number_losses) if self._number_losses else None
            self._number_losses.clear()
            self._left, self._jumped = self.FIRST_STEPS, 0
        found = {
            "uniform-trap": self._uniform_trap(record),
            "loss-spike": self._spike(record),
            "kl-above-bound": self._kl(record),
            "number-loss-jump": self._jump(record),
        }
        alarms = []
        for kind, (raised, text) in found.items():
            if raised and kind not in self._raised:
                which = list(samples)[:SHOWN_SAMPLES] if kind == "loss-spike" else []
                alarms.append(Alarm(int(record["step"]), kind, text, which))
            (self._raised.add if raised else self._raised.discard)(kind)
        return alarms

    def _uniform_trap(self, record: Mapping[str, Any]) -> tuple[bool, str]:
        """P = 1/V for all words has loss 1 + ln V and sum P = 1. It looks trained, but has learned no words."""
        names = ("train/accuracy", "train/cls_loss_mean", "train/prob_sum_mean")
        accuracy, loss, prob_sum = (record.get(name) for name in names)
        if self.uniform is None or accuracy is None or loss is None or prob_sum is None:
            return "uniform-trap" in self._raised, ""
        near = abs(loss - self.uniform) < 0.05 * self.uniform and 0.5 < prob_sum < 2.0 and accuracy < self.poor
        self._trapped = self._trapped + 1 if near else 0
        return self._trapped >= (self.UNTAUGHT_LOOKS if self.untaught else self.TRAP_LOOKS), (
            f"the word loss is {loss:.2f}; P = 1/V everywhere costs 1 + ln V = {self.uniform:.2f}. The sum of P is "
            f"{prob_sum:.2f} but accuracy only {accuracy:.1%}. The run sits in the uniform solution: begin again "
            "from a pretrained base with `start: calibrated`, or with larger rates for {b_scale, C} (lr_groups.scales)"
        )

    def _kl(self, record: Mapping[str, Any]) -> tuple[bool, str]:
        """S3 2.3: KL(U, U at the start) <= eps."""
        kl, eps = record.get("train/kl"), record.get("train/kl_eps")
        if kl is None or eps is None:  # not measured at this step
            return "kl-above-bound" in self._raised, ""
        self._beyond = self._beyond + 1 if kl > eps else 0
        advice = "lower the rates of abduction and scales" if self.kl_held else "hold it by loss.constraint.mode: dual"
        return self._beyond >= (self.KL_LOOKS if self.kl_held else 1), (
            f"U has moved from its start by a KL of {kl:.3g} nats a dimension, over its bound {eps:g} "
            f"(loss.constraint.eps): {advice}, or allow more"
        )

    def _spike(self, record: Mapping[str, Any]) -> tuple[bool, str]:
        loss = record.get("train/total_loss")
        if loss is None or not math.isfinite(loss):
            return False, ""
        raised, text = False, ""
        if len(self._losses) >= self.LEAST_HISTORY:
            median = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(x - median) for x in self._losses)
            unit = max(spread, 0.02 * abs(median), 1e-3)
            raised = loss - median > self.SPIKE * unit
            text = (
                f"the loss is {loss:.4g} while the median of the last {len(self._losses)} steps was {median:.4g} "
                f"({(loss - median) / unit:.0f} deviations)"
            )
        self._losses.append(loss)
        return raised, text

    def _jump(self, record: Mapping[str, Any]) -> tuple[bool, str]:
        """A stage that begins too fast: the number's law is narrow, so a shifted z costs numbers most."""
        loss = record.get("train/reg_loss_effective")
        if loss is None or not math.isfinite(loss):
            return "number-loss-jump" in self._raised, ""
        self._number_losses.append(loss)
        self._left -= 1
        if self._before is None or self._left < 0:
            return False, ""
        self._jumped += loss - self._before > self.JUMP
        return self._jumped >= 3, (
            f"stage {record.get('stage')} begins with a number loss of {loss:.3g}, while the stage before ended with "
            f"{self._before:.3g}: give it warmup_steps, or lower rates for embedding, lora and scales"
        )


class Refusals:
    """Tolerates fewer than `LIMIT` consecutive steps with a loss or gradient that is not finite. Equal on all ranks."""

    LIMIT = 3

    def __init__(self) -> None:
        self.in_a_row = 0

    def refuse(
        self, error: NonFiniteStep, step: int, total: int, stage: str, loader: Loader, alarm: Callable[[Alarm], None]
    ) -> dict[str, Any]:
        """Record a refused step, which changed no parameter, and raise an alarm with its samples. Returns its metrics.

        step: counted from 1 to `total`. loader: has the samples. alarm: receives the alarm. Raises `NonFiniteStep` at
        the `LIMIT`-th consecutive refusal, and at the last step of the run.
        """
        self.in_a_row += 1
        samples, suspects = loader.handed_out(), loader.handed_out(error.ranks)
        named = ", ".join(map(str, (suspects or samples)[:SHOWN_SAMPLES]))
        which = "samples of the ranks whose features are not finite" if suspects else "samples of the step"
        text = f"step {step}, stage {stage}: {error}; {which}: {named}"
        if self.in_a_row >= self.LIMIT:
            raise NonFiniteStep(f"{text}. {self.in_a_row} in a row were refused: stopping") from error
        if step == total:
            raise NonFiniteStep(f"{text}. It was the run's last: there is nothing after it to learn from") from error
        alarm(Alarm(step, "refused-step", text, samples[:SHOWN_SAMPLES]))
        return {"train/refused": 1.0}

    def taken(self) -> None:
        """Record that a step was taken."""
        self.in_a_row = 0
