"""Forgetting, measured while it happens: metrics on texts of other kinds, on which the run does not train.

watch/NAME/accuracy       argmax P over every labelled position of `data.watch.NAME`
watch/NAME/base_accuracy  the base model's own top-1 on them; perplexity, base_perplexity and cls_loss_mean likewise
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.dataset import TextDataset, tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.training.evaluation.evaluator import Evaluator

FIGURES = ("accuracy", "base_accuracy", "perplexity", "base_perplexity", "cls_loss_mean")


def read_watched(config: DataConfig, tokenizer: NumericalAwareTokenizer) -> dict[str, TextDataset]:
    """The texts of `data.watch` by name, in memory. Raises `UserError`."""
    found = {}
    for name in config.watch:
        key, own = f"data.watch.{name}.source", config.of_watched(name)
        found[name] = tokenise(read_texts(str(own.train), own, ReadReport(), key), tokenizer, own)
        if not found[name].report.texts:
            raise UserError(key, "no usable text", "one text or more", str(own.train))
    return found


class WatchedEvaluators:
    """Evaluates what is watched. Collective over the world."""

    def __init__(self, texts: dict[str, TextDataset], evaluator: Callable[[TextDataset], Evaluator]) -> None:
        self.evaluators = {name: evaluator(dataset) for name, dataset in texts.items()}

    def measure_base(self) -> None:
        """The base model's own metrics; only before training."""
        for evaluator in self.evaluators.values():
            evaluator.measure_base()

    def __call__(self) -> dict[str, float]:
        """The present metrics, equal on every rank."""
        found = {}
        for name, evaluator in self.evaluators.items():
            metrics = evaluator()
            found.update({f"watch/{name}/{key}": metrics[f"eval/{key}"] for key in FIGURES if f"eval/{key}" in metrics})
        return found

    def state_dict(self) -> dict[str, Any]:
        """The base's metrics by name: they cannot be measured again once training has begun."""
        return {name: evaluator.base for name, evaluator in self.evaluators.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        for name, base in state.items():
            self.evaluators[name].base = base
