"""Begin with trained weights: another run's or checkpoint's, or adapters that PEFT saved.

Only weights: optimizers, stages and the data's order begin anew. Heads keep the units that they were trained in (the
target transform's median and scale, b_noise's own rate) instead of the new data's, and are not calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import load_checkpoint, refuse_strange
from cqwen_dist.config import Config, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.run.files import LATEST
from cqwen_dist.targets import TargetTransform
from cqwen_dist.training.state import head_tensors, load_heads
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
    """Weights by name: adapters, w_num and <NUM>'s row; of a checkpoint also the heads and state.json's content."""

    source: Path
    features: dict[str, Tensor]
    heads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def apply(self, engine: Engine, config: Config) -> None:
        """Load it into a new model. Collective. Raises `UserError` by key where it does not fit."""
        if self.state:
            self._check_shape(engine.model.config, config)
        known = engine.feature_shapes()
        refuse_strange(self.features, known, self.source, key=KEY, dtype=None, all_of_them=False)
        parameters, moments, steps = engine.feature_state()
        engine.load_feature_state({**parameters, **self.features}, moments, steps)
        if self.heads:
            shapes = {name: tensor.shape for name, tensor in head_tensors(engine).items() if tensor.numel()}
            refuse_strange(self.heads, shapes, self.source, key=KEY)
            load_heads(engine, self.heads, self.state)

    def _check_shape(self, ours: Any, config: Config) -> None:
        saved = self.state["model"]
        for name, key in _SHAPE.items():
            if getattr(ours, name) != saved.get(name):
                raise UserError(key, getattr(ours, name), f"{saved.get(name)!r}, as in {self.source}")
        unit = TargetTransform.from_dict(saved["target"]).name
        if unit != config.target_transform:
            raise UserError("loss.target_transform", config.target_transform, f"{unit!r}, as in {self.source}")
        if ours.lora is not None and saved["lora"] is not None:
            for name, value in saved["lora"].items():
                if name not in ("dropout", "lr_ratio") and ours.lora.get(name) != value:  # these two are of training
                    raise UserError(f"model.lora.{name}", ours.lora.get(name), f"{value!r}, as in {self.source}")


def read_warm_start(config: Config, row_range: tuple[int, int]) -> WarmStart | None:
    """The weights that `model.warm_start` names (this rank's rows), or None. Raises `UserError`, also for a pickle."""
    if config.model.warm_start is None:
        return None
    path = Path(config.model.warm_start).expanduser()
    if not path.is_dir() and path.name != LATEST:
        raise UserError(KEY, str(path), "the folder of a run, of a checkpoint, or of an adapter that PEFT saved")
    if (path / adapter.CONFIG).is_file():
        adapter.refuse_lora_changes(path, config.model.lora)
        found = WarmStart(path, adapter.read_adapter(path))
    else:
        _, folder = resolve_checkpoint(path)
        saved = load_checkpoint(folder, row_range, moments=False)
        found = WarmStart(folder, saved.features, {**saved.heads, **saved.rows}, saved.state)
    if adapter.to_peft(found.features) and not config.trains("lora"):
        allowed = "weights without adapters, as no stage trains lora (`cqwen export --merge` folds them into a base)"
        raise UserError(KEY, Said(f"adapters in {found.source}"), allowed)
    return found
