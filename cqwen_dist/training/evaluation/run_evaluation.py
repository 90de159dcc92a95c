"""The evaluations of a run: held-out texts, and watched texts of other kinds that are never trained on.

watch/NAME/accuracy       argmax P at all labelled positions of `data.watch.NAME`
watch/NAME/base_accuracy  top-1 of the base model on them; likewise perplexity, base_perplexity and cls_loss_mean

Rank 0 writes chart data to RUN/evaluations, for the evaluation before training and the last one of each stage:

step-00000150.json        {"step", "stage", "numbers": the drawing of `number_metrics`}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.run.files import EVALUATIONS, read_object, write_atomically
from cqwen_dist.training.evaluation.evaluator import Evaluator
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION

WATCHED = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


class Evaluations:
    """Evaluates a run before and during training. Collective over the world."""

    def __init__(self, held_out: Evaluator | None, watched: dict[str, Evaluator], run_dir: Path | None) -> None:
        """held_out: None without held-out texts. watched: evaluators by name. run_dir: None except on rank 0."""
        self.held_out, self.watched = held_out, watched
        self.folder = None if run_dir is None else run_dir / EVALUATIONS

    @property
    def base_accuracy(self) -> float | None:
        """Top-1 of the base model on the held-out texts."""
        return None if self.held_out is None else self.held_out.base.get("eval/base_accuracy")

    def measure_base(self) -> None:
        """Measure the base model. Only before training."""
        for evaluator in (self.held_out, *self.watched.values()):
            if evaluator is not None:
                evaluator.measure_base()

    def __call__(self, step: int, stage: str) -> dict[str, Any]:
        """The metrics after `step`, equal on all ranks. Also stores chart data for a report."""
        metrics: dict[str, Any] = {}
        for name, evaluator in self.watched.items():
            found = evaluator.words()
            metrics |= {f"watch/{name}/{key}": found[f"eval/{key}"] for key in WATCHED if f"eval/{key}" in found}
        if self.held_out is not None:
            metrics |= self.held_out()
            if self.folder is not None:
                self._write(self.folder, step, stage, self.held_out.drawing)
        return metrics

    def shown(self, metrics: dict[str, Any]) -> str:
        """The main metrics in one line for the user; empty without evaluators."""
        parts = []
        if self.held_out is not None:
            base = f" (base {metrics['eval/base_accuracy']:.1%})" if "eval/base_accuracy" in metrics else ""
            parts.append(f"accuracy {metrics['eval/accuracy']:.1%}{base}")
            parts.append(f"<NUM> F1 {metrics['eval/num_f1']:.3f}")
        if "eval/reg_mdae" in metrics:
            parts.append(f"MdAE {metrics['eval/reg_mdae']:.4g}")
        if "eval/baseline_mdae" in metrics:
            parts.append(f"always the median's {metrics['eval/baseline_mdae']:.4g}")
        for name in self.watched:
            now, base = (metrics[f"watch/{name}/{key}"] for key in ("accuracy", "base_accuracy"))
            parts.append(f"{name} {now:.1%} (base {base:.1%})")
        return ", ".join(parts)

    # ---------------------------------------------------------------------------- data for a report's charts

    def _write(self, folder: Path, step: int, stage: str, numbers: dict[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "stage": stage, "numbers": numbers}
        write_atomically(folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False))
        for other in folder.glob("step-" + 8 * "[0-9]" + ".json"):
            at = int(other.stem.removeprefix("step-"))
            if at > step or (0 < at < step and read_object(other).get("stage") == stage):
                other.unlink()

    # ------------------------------------------------------------------------------------ checkpoint

    def factors(self) -> dict[str, Any]:
        """Interval factors of the last evaluation for the metrics in a checkpoint; {} without factors."""
        known = None if self.held_out is None else self.held_out.factors
        return {} if known is None else {CALIBRATION: known.to_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Metrics of the base model, which cannot be measured again after training has started."""
        watched = {name: evaluator.base for name, evaluator in self.watched.items()}
        return {"base": {} if self.held_out is None else self.held_out.base, "watch": watched}

    def load_state_dict(self, state: dict[str, Any], factors: dict[str, Any] | None) -> None:
        """Restore `state_dict` and `factors`."""
        for name, base in state["watch"].items():
            self.watched[name].base = base
        if self.held_out is not None:
            self.held_out.base = state["base"]
            self.held_out.factors = None if factors is None else Intervals.from_dict(factors)
