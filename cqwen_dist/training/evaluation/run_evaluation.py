"""A run's evaluations: its held-out texts, and watched texts of other kinds, on which it does not train.

watch/NAME/accuracy       argmax P over every labelled position of `data.watch.NAME`
watch/NAME/base_accuracy  the base model's own top-1 on them; perplexity, base_perplexity and cls_loss_mean likewise
"""

from __future__ import annotations

from typing import Any

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.dataset import TextDataset, tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.training.evaluation.conformal import CALIBRATION, IntervalFactors
from cqwen_dist.training.evaluation.evaluation_folder import EvaluationFolder
from cqwen_dist.training.evaluation.evaluator import Evaluator

WATCHED = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


def read_watched(config: DataConfig, tokenizer: NumericalAwareTokenizer) -> dict[str, TextDataset]:
    """The texts of `data.watch` by name, in memory. Raises `UserError`."""
    found = {}
    for name in config.watch:
        key, own = f"data.watch.{name}.source", config.of_watched(name)
        found[name] = tokenise(read_texts(str(own.train), own, ReadReport(), key), tokenizer, own)
        if not found[name].report.texts:
            raise UserError(key, "no usable text", "one text or more", str(own.train))
    return found


class Evaluations:
    """Evaluates a run at its start and during training. Collective over the world."""

    def __init__(
        self, held_out: Evaluator | None, watched: dict[str, Evaluator], store: EvaluationFolder | None
    ) -> None:
        """held_out: None without such texts. watched: by name. store: the main rank's."""
        self.held_out, self.watched, self.store = held_out, watched, store

    @property
    def base_accuracy(self) -> float | None:
        """The base model's own top-1 on the held-out texts."""
        return None if self.held_out is None else self.held_out.base.get("eval/base_accuracy")

    def measure_base(self) -> None:
        """Measure the base model's own metrics; only before training."""
        for evaluator in (self.held_out, *self.watched.values()):
            if evaluator is not None:
                evaluator.measure_base()

    def __call__(self, step: int, stage: str) -> dict[str, Any]:
        """The metrics after `step`, equal on every rank; stores what a report draws."""
        metrics: dict[str, Any] = {}
        for name, evaluator in self.watched.items():
            found = evaluator()
            metrics |= {f"watch/{name}/{key}": found[f"eval/{key}"] for key in WATCHED if f"eval/{key}" in found}
        if self.held_out is not None:
            metrics |= self.held_out()
            if self.store is not None and self.held_out.last is not None:
                self.store.write(step, stage, self.held_out.last)
        return metrics

    def shown(self, metrics: dict[str, Any]) -> str:
        """The main metrics in one line for people; empty where nothing is evaluated."""
        parts = []
        if self.held_out is not None:
            parts.append(f"accuracy {metrics['eval/accuracy']:.1%} (base {metrics.get('eval/base_accuracy', 0):.1%})")
            parts.append(f"<NUM> F1 {metrics['eval/num_f1']:.3f}")
        if "eval/reg_mdae" in metrics:
            parts.append(f"MdAE {metrics['eval/reg_mdae']:.4g}")
        if "eval/baseline_mdae" in metrics:
            parts.append(f"always the median's {metrics['eval/baseline_mdae']:.4g}")
        for name in self.watched:
            now, base = (metrics[f"watch/{name}/{key}"] for key in ("accuracy", "base_accuracy"))
            parts.append(f"{name} {now:.1%} (base {base:.1%})")
        return ", ".join(parts)

    # ------------------------------------------------------------------------------------ checkpoint

    def factors(self) -> dict[str, Any]:
        """The last evaluation's interval factors, for a checkpoint's metrics; empty without."""
        known = None if self.held_out is None else self.held_out.factors
        return {} if known is None else {CALIBRATION: known.to_dict()}

    def state_dict(self) -> dict[str, Any]:
        """The base's metrics, which cannot be measured again once training has begun."""
        watched = {name: evaluator.base for name, evaluator in self.watched.items()}
        return {"base": {} if self.held_out is None else self.held_out.base, "watch": watched}

    def load_state_dict(self, state: dict[str, Any], factors: dict[str, Any] | None) -> None:
        """Restore what `state_dict` and `factors` returned."""
        for name, base in state.get("watch", {}).items():
            self.watched[name].base = base
        if self.held_out is not None:
            self.held_out.base = state["base"]
            self.held_out.factors = None if factors is None else IntervalFactors.from_dict(factors)
