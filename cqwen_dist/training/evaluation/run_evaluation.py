"""All that a run is judged by: its held-out texts, the watched texts, its thresholds by word frequency."""

from __future__ import annotations

from typing import Any

from cqwen_dist.training.evaluation.conformal import CALIBRATION, IntervalFactors
from cqwen_dist.training.evaluation.evaluation_folder import EvaluationFolder
from cqwen_dist.training.evaluation.evaluator import Evaluator
from cqwen_dist.training.evaluation.watched_texts import WatchedEvaluators
from cqwen_dist.training.frequency import ThresholdBands


class Evaluations:
    """Evaluates a run at its start and as it goes. Collective over the world."""

    def __init__(
        self,
        held_out: Evaluator | None,
        watch: WatchedEvaluators,
        bands: ThresholdBands,
        store: EvaluationFolder | None,
    ) -> None:
        """held_out: None without such texts. store: None on all ranks but the main one."""
        self.held_out, self.watch, self.bands, self.store = held_out, watch, bands, store

    @property
    def base_accuracy(self) -> float | None:
        """The base model's own top-1 on the held-out texts."""
        return None if self.held_out is None else self.held_out.base.get("eval/base_accuracy")

    def measure_base(self) -> None:
        """Measure the base model's own metrics; only before training."""
        if self.held_out is not None:
            self.held_out.measure_base()
        self.watch.measure_base()

    def __call__(self, step: int, stage: str) -> dict[str, Any]:
        """An evaluation after `step`; what only a report draws is stored."""
        metrics: dict[str, Any] = self.watch()
        if self.held_out is not None:
            metrics |= self.held_out() | self.bands(self.held_out.model.action.threshold)
            if self.store is not None and self.held_out.last is not None:
                self.store.write(step, stage, self.held_out.last)
        return metrics

    def shown(self, metrics: dict[str, Any]) -> str:
        """The main metrics in one line for people; empty where nothing is evaluated."""
        said = []
        if self.held_out is not None:
            said.append(f"accuracy {metrics['eval/accuracy']:.1%} (base {metrics.get('eval/base_accuracy', 0):.1%})")
            said.append(f"<NUM> F1 {metrics['eval/num_f1']:.3f}")
        if "eval/reg_mdae" in metrics:
            said.append(f"MdAE {metrics['eval/reg_mdae']:.4g}")
        if "eval/baseline_mdae" in metrics:
            said.append(f"always the median's {metrics['eval/baseline_mdae']:.4g}")
        for name in self.watch.evaluators:
            now, base = (metrics[f"watch/{name}/{key}"] for key in ("accuracy", "base_accuracy"))
            said.append(f"{name} {now:.1%} (base {base:.1%})")
        return ", ".join(said)

    # ------------------------------------------------------------------------------------ checkpoint

    def factors(self) -> dict[str, Any]:
        """The last evaluation's interval factors, for a checkpoint's metrics; empty without."""
        known = None if self.held_out is None else self.held_out.factors
        return {} if known is None else {CALIBRATION: known.to_dict()}

    def state_dict(self) -> dict[str, Any]:
        """The base's metrics, which cannot be measured again."""
        return {"base": {} if self.held_out is None else self.held_out.base, "watch": self.watch.state_dict()}

    def load_state_dict(self, state: dict[str, Any], factors: dict[str, Any] | None) -> None:
        """Put back what `state_dict` and `factors` gave."""
        self.watch.load_state_dict(state.get("watch", {}))
        if self.held_out is not None:
            self.held_out.base = state["base"]
            self.held_out.factors = None if factors is None else IntervalFactors.from_dict(factors)
