"""Begin with weights that were trained before: another run's or checkpoint's, or adapters that PEFT saved.

Only weights: optimizers, stages and the data's order begin anew. Heads come with the unit they were trained in (the
target transform's median and scale, b_noise's own rate), not the new data's, and are not calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import load_checkpoint, refuse_strange
from cqwen_dist.config import Config, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import LATEST
from cqwen_dist.targets import TargetTransform
from cqwen_dist.training.state import head_tensors
from cqwen_dist.training.zero.engine import Engine

KEY = "model.warm_start"
# The shape of a model, and the key that sets it.
_SHAPE = {
    "causal_size": "model.causal_size",
    "number_dims": "model.number_dims",
    "abduction": "model.abduction",
    "scale_activation": "model.scale_activation",
    "scalar_threshold": "train.thresholds",
    "number_types": "data.number_types",
    "more_values": "data.more_values",
    "num_token_id": "model.num_token_id",
    "vocab_size": KEY,
    "hidden_size": KEY,
}


@dataclass(frozen=True)
class WarmStart:
    """Weights by name: adapters and the embedding's part; the heads, unless it is PEFT's folder."""

    source: Path
    features: dict[str, Tensor]
    heads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def apply(self, engine: Engine, config: Config) -> None:
        """Load it into a new model. Collective. Raises `UserError` by key where it does not fit."""
        if self.state:
            self._check_shape(engine.model.config, config)
        known = engine.feature_shapes()
        refuse_strange(self.features, known, self.source, key=KEY, dtype=None, all_of_them=False)
        parameters, moments, steps = engine.feature_state()
        engine.load_feature_state({**parameters, **self.features}, moments, steps)
        if self.heads:
            tensors = head_tensors(engine)
            shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor.numel()}
            refuse_strange(self.heads, shapes, self.source, key=KEY)
            for name, value in self.heads.items():
                tensors[name].copy_(value)
            engine.heads.noise_unit = self.state["noise_unit"]
            model, saved = engine.model, self.state["model"]
            model.config.target = saved["target"]
            model.config.scale_floor = model.abduction.scale_floor = saved["scale_floor"]

    def _check_shape(self, ours: Any, config: Config) -> None:
        saved = self.state["model"]
        for name, key in _SHAPE.items():
            here, there = getattr(ours, name), saved.get(name)
            if here != there:
                raise UserError(key, here, f"{there!r}, as in {self.source}")
        unit = TargetTransform.from_dict(saved["target"]).name
        if unit != config.target_transform:
            raise UserError("loss.target_transform", config.target_transform, f"{unit!r}, as in {self.source}")
        if ours.lora is not None and saved["lora"] is not None:
            for name, there in saved["lora"].items():
                if name in ("dropout", "lr_ratio"):  # of training, not of the weights
                    continue
                if ours.lora.get(name) != there:
                    raise UserError(f"model.lora.{name}", ours.lora.get(name), f"{there!r}, as in {self.source}")


def read_warm_start(config: Config, row_range: tuple[int, int]) -> WarmStart | None:
    """The weights that `model.warm_start` names (this rank's rows), or None. Raises `UserError`, also for a pickle."""
    if config.model.warm_start is None:
        return None
    path = Path(config.model.warm_start).expanduser()
    if not path.is_dir() and path.name != LATEST:
        raise UserError(KEY, str(path), "the folder of a run, of a checkpoint, or of an adapter that PEFT saved")
    if (path / adapter.CONFIG).is_file():
        adapter.refuse_lora_changes(path, config.model.lora)
        return _with_adapters(WarmStart(path, adapter.read_adapter(path)), config)
    _, folder = resolve_checkpoint(path)
    saved = load_checkpoint(folder, row_range, moments=False)
    return _with_adapters(WarmStart(folder, saved.features, {**saved.heads, **saved.rows}, saved.state), config)


def _with_adapters(found: WarmStart, config: Config) -> WarmStart:
    if adapter.to_peft(found.features) and not config.trains("lora"):
        allowed = "weights without adapters, as no stage trains lora (`cqwen export --merge` folds them into a base)"
        raise UserError(KEY, Said(f"adapters in {found.source}"), allowed)
    return found
