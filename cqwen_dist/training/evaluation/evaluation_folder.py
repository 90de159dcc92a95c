"""RUN/evaluations: what a report draws, one small JSON file per evaluation, written by rank 0.

step-00000150.json      {"step", "stage", "numbers": the drawing of `number_metrics`, "tokens": [...]}
probe_start.safetensors U of the first few held-out tokens before training, which later ones are compared with

Kept are the evaluation before training and the last one of each stage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.run.files import EVALUATIONS, PROBE, let_read, write_atomically, written_whole
from cqwen_dist.training.evaluation.evaluator import Evaluation


class EvaluationFolder:
    """Writes evaluations of a run, words by its tokenizer."""

    def __init__(self, run_dir: Path, tokenizer: NumericalAwareTokenizer) -> None:
        self.folder, self.tokenizer = run_dir / EVALUATIONS, tokenizer

    def write(self, step: int, stage: str, found: Evaluation) -> None:
        """Write the evaluation after `step` of a stage; step 0 is before training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        start = self.folder / PROBE
        if step == 0 or not start.is_file():
            with written_whole(start) as beside:
                save_file({"loc": found.probe.loc.contiguous(), "scale": found.probe.scale.contiguous()}, beside)
                let_read(beside)
        tokens = self._tokens(found, Cauchy(**load_file(start)))
        content = {"step": step, "stage": stage, "numbers": found.numbers, "tokens": tokens}
        write_atomically(self.folder / f"step-{step:08d}.json", json.dumps(content, ensure_ascii=False))
        for other in self.folder.glob("step-*.json"):
            at = int(other.stem.removeprefix("step-"))
            if at > step or (0 < at < step and json.loads(other.read_text(encoding="utf-8"))["stage"] == stage):
                other.unlink()

    def _tokens(self, found: Evaluation, start: Cauchy) -> list[dict[str, Any]]:
        """For each probed token: the word that follows, how far U has moved, how wide it is."""
        if not len(found.labels) or start.loc.shape != found.probe.loc.shape:
            return []
        kl = found.probe.kl(start).mean(1)
        # pooled over dimensions: number dimensions have no spread of their own before training
        spread = start.loc.var(0).mean().sqrt().clamp(min=1e-12) if len(start.loc) > 1 else torch.ones(())
        shift = (found.probe.loc - start.loc).square().mean(1).sqrt() / spread
        widened = (found.probe.scale.log() - start.scale.log()).median(1).values
        rows = zip(found.labels.tolist(), kl.tolist(), shift.tolist(), widened.exp().tolist(), strict=True)
        return [{"word": self._word(i), "kl": _short(k), "shift": _short(s), "scale": _short(w)} for i, k, s, w in rows]

    def _word(self, word_id: int) -> str:
        return "<NUM>" if word_id == self.tokenizer.num_token_id else self.tokenizer.decode([word_id], [0.0])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
