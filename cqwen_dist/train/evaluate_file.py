"""`cqwen eval`: the training run's evaluation, of a checkpoint or an exported folder, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from cqwen_dist.checkpoint.export import is_exported, load_trained, run_of
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.dataset import tokenise
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.sources import ReadReport, read_split, read_texts
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.train.evaluate import Evaluator
from cqwen_dist.train.run_folder import START


def evaluate_checkpoint(path: Path, data: str | None, micro_batch_size: int = 8) -> dict[str, float]:
    """The figures of `train.evaluate` on `data` (default: the run's own held-out texts).

    An exported folder has no run beside it: then `data` is needed, its field is `text`, and there is no baseline.
    The base model's own top-1 is known for the run's own texts alone. Raises `UserError`.
    """
    baseline: float | None = None
    base_accuracy: float | None = None
    only_used, gemm_dtype = False, torch.float32
    if is_exported(path):
        if data is None:
            raise UserError("--data", "no value", "a JSONL file or bundled:NAME (an exported folder holds no data)")
        config = DataConfig(train=data)
    else:
        run, _ = run_of(path)
        config = run.data
        only_used = run.loss.negatives == "used"
        gemm_dtype = torch.bfloat16 if run.train.precision == "bf16" else torch.float32
        start = _start_of(Path(run.run.dir))
        baseline = start["statistics"]["median"] if start["statistics"]["count"] else None
        base_accuracy = start.get("base_accuracy") if data is None else None
    report = ReadReport()
    texts = list(read_texts(data, config, report, "--data")) if data is not None else read_split(config, report)[1]
    if not texts:
        raise UserError("--data", "no texts", "held-out texts (the run held none out)")
    model, tokenizer = load_trained(path)
    with distributed() as runtime:
        dataset = tokenise(texts, tokenizer, config)
        inner = model.model.to(runtime.device)
        batches = EvalLoader(dataset, rank=0, world=1, micro_batch_size=micro_batch_size)
        evaluator = Evaluator(
            inner,
            inner.kept_features,
            batches,
            build_groups(1),
            baseline_value=baseline,
            used_rows=inner.config.used_rows if only_used else None,
            gemm_dtype=gemm_dtype,
        )
        evaluator.base_accuracy = base_accuracy
        return evaluator()


def _start_of(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / START).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(START, "no such file", "the file that the run wrote when it began", str(run)) from None
