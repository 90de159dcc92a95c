"""All that a run is judged by: its held-out texts, the texts that it watches, its thresholds by frequency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cqwen_dist.config import Config
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.train.evaluation.conformal import CALIBRATION, IntervalFactors
from cqwen_dist.train.evaluation.evaluator import Evaluator, Features
from cqwen_dist.train.evaluation.retention import Watch, read_watched
from cqwen_dist.train.evaluation.store import EvaluationFolder
from cqwen_dist.train.frequency import ThresholdBands


class Evaluations:
    """Evaluates a run at its start and as it goes. Collective over the world; `held_out` is None without such texts."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        groups: Groups,
        model: CausalQwenModel,
        features: Features,
        tokenizer: NumericalAwareTokenizer,
        held_out: TextDataset | None,
        *,
        baseline_value: float | None,
        used_rows: int | None,
        gemm_dtype: torch.dtype,
        word_counts: np.ndarray,
        numerals: Sequence[int] = (),
        progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        """As `Evaluator`'s. Raises `UserError` for texts to watch that cannot be read."""

        def evaluator(dataset: TextDataset) -> Evaluator:
            size = config.train.micro_batch_size
            return Evaluator(
                model,
                features,
                EvalLoader(dataset, rank=runtime.rank, world=groups.world_size, micro_batch_size=size),
                groups,
                baseline_value=baseline_value,
                used_rows=used_rows,
                gemm_dtype=gemm_dtype,
                word_counts=word_counts,
                numerals=numerals,
                progress=progress,
            )

        self.action, self.is_main = model.action, runtime.is_main
        self.held_out = None if held_out is None else evaluator(held_out)
        self.watch = Watch(read_watched(config.data, tokenizer), evaluator)
        self.bands = ThresholdBands(word_counts, model.action.vocab_start, model.action.rows, groups)
        self.folder = EvaluationFolder(Path(config.run.dir), tokenizer)

    @property
    def base_accuracy(self) -> float | None:
        """The base model's own top-1 on the held-out texts."""
        return None if self.held_out is None else self.held_out.base.get("eval/base_accuracy")

    def measure_base(self) -> None:
        """The base model's own metrics; only before training."""
        if self.held_out is not None:
            self.held_out.measure_base()
        self.watch.measure_base()

    def __call__(self, step: int, stage: str) -> dict[str, Any]:
        """An evaluation after `step`; what only a report needs of it is kept beside."""
        metrics: dict[str, Any] = self.watch()
        if self.held_out is not None:
            metrics |= self.held_out() | self.bands(self.action.threshold)
            if self.is_main and self.held_out.last is not None:
                self.folder.write(step, stage, self.held_out.last)
        return metrics

    def shown(self, metrics: dict[str, Any]) -> str:
        """The metrics that a person follows, in one line; empty where nothing is evaluated."""
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
        """The last evaluation's factors of intervals, to stand among a checkpoint's metrics; empty without."""
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
