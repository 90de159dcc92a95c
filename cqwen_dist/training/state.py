"""A run's state, to and from a checkpoint: where the run is, and all that trains, in whole tensors and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.checkpoint.identity import refuse_exchanged
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, refuse_strange
from cqwen_dist.checkpoint.saving import About
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.lora import is_lora
from cqwen_dist.run.files import START_TENSORS
from cqwen_dist.training.assembly import Run
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION
from cqwen_dist.training.optim import MOMENTS
from cqwen_dist.training.parameter_groups import has_rows
from cqwen_dist.training.zero.engine import Engine


@dataclass
class Place:
    """Where a run is, as saved in a checkpoint. The same on every rank."""

    step: int = 0
    stage: str = ""
    loader: dict[str, int] = field(default_factory=dict)  # where the next step's samples come from
    figures: dict[str, Any] = field(default_factory=dict)  # metrics of the last evaluation
    due: dict[str, Any] | None = None  # the record of `step`, where its evaluation was cut short
    evaluated: bool = False  # whether the metrics are of `step`
    exchanged: list[str] = field(default_factory=list)  # inputs that were exchanged since (`run.accept`)

    def to_dict(self) -> dict[str, Any]:
        """For state.json."""
        due = None
        if self.due is not None:
            due = {key: float(value) if isinstance(value, Tensor) else value for key, value in self.due.items()}
        return {**vars(self), "due": due}


def save(run: Run, place: Place) -> None:
    """Save a checkpoint of all that trains and of where the run is. Collective over the world."""
    progress = {
        **place.to_dict(),
        "schedule": run.schedule.state_dict(),
        "constraint": run.constraint.state_dict(),
        "norms": run.engine.usual.seen,
        "inputs": run.inputs,
        **run.evaluations.state_dict(),
        "figures": {**place.figures, **run.evaluations.factors()},
    }
    evaluated = place.figures if place.evaluated else {}
    about = About(place.step, place.stage, evaluated, run.config.model_dump(mode="json"), run.config.base_folder)
    run.saver.save(lambda: _collect(run.engine, progress), about)


def restore(run: Run, folder: Path) -> Place:
    """Restore what `save` saved, on any ranks; returns where the run goes on. Raises `UserError`."""
    found = load_checkpoint(folder, row_range(run.model))
    state = found.state
    exchanged = refuse_exchanged(state.get("inputs", {}), run.inputs, run.config.run.accept, folder)
    _restore(run.engine, found, folder)
    place = Place(**{key: state[key] for key in Place().to_dict() if key in state})
    place.exchanged = exchanged
    factors = place.figures.pop(CALIBRATION, None)
    run.schedule.load_state_dict(state["schedule"], place.step)
    if run.config.loss.constraint.mode != "off":
        run.constraint.load(run.folder / START_TENSORS, state["constraint"])
    run.engine.usual.seen = list(state.get("norms", []))
    run.loaders.load_state_dict(state["loader"], "data" in exchanged)
    run.evaluations.load_state_dict(state, factors)
    return place


def row_range(model: CausalQwenModel) -> tuple[int, int]:
    """[start, stop) of the vocabulary's rows that this rank holds."""
    return model.action.vocab_start, model.action.vocab_start + model.action.rows


def _collect(engine: Engine, progress: dict[str, Any]) -> TrainState:
    """All that trains, ready to be saved. progress: where the run is (step, stage, ...). Collective."""
    parameters, moments, feature_steps = engine.feature_state()
    head_moments, head_steps = engine.heads.moments()
    tensors = head_tensors(engine)
    rows = {name for name, tensor in tensors.items() if has_rows(name, tensor)}
    return TrainState(
        features=parameters,
        feature_moments=moments,
        heads={name: t for name, t in tensors.items() if name not in rows},
        head_moments={name: t for name, t in head_moments.items() if name.rpartition(".")[0] not in rows},
        rows={name: t for name, t in tensors.items() if name in rows},
        row_moments={name: t for name, t in head_moments.items() if name.rpartition(".")[0] in rows},
        row_range=row_range(engine.model),
        state={
            **progress,
            "feature_steps": feature_steps,
            "head_steps": head_steps,
            "noise_unit": engine.heads.noise_unit,
            "model": engine.model.config.to_dict(),
        },
    )


def _restore(engine: Engine, state: TrainState, source: Path) -> None:
    """Put what `_collect` returned, on any ranks, back into the engine. source: where it was read, for errors."""
    tensors, features = head_tensors(engine), engine.feature_shapes()
    if state.state["model"]["lora"] is None:  # a stage that trains adapters was appended since: they begin now
        parameters, moments, _ = engine.feature_state()
        state.features = {**{name: value for name, value in parameters.items() if is_lora(name)}, **state.features}
        state.feature_moments = {**{name: m for name, m in moments.items() if is_lora(name)}, **state.feature_moments}
    heads = {name: tensor.shape for name, tensor in tensors.items() if tensor.numel()}  # a rank may have no rows
    stepped = {name: shape for name, shape in heads.items() if name in state.state["head_steps"]}
    for found, wanted in (
        ({**state.heads, **state.rows}, heads),
        ({**state.head_moments, **state.row_moments}, _moments_of(stepped)),
        (state.features, features),
        (state.feature_moments, _moments_of(features)),
    ):
        refuse_strange(found, wanted, source)
    load_heads(engine, {**state.heads, **state.rows}, state.state)
    engine.heads.load_moments({**state.head_moments, **state.row_moments}, state.state["head_steps"])
    engine.load_feature_state(state.features, state.feature_moments, state.state["feature_steps"])


@torch.no_grad()
def load_heads(engine: Engine, values: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Copy a checkpoint's heads into the model, with the units that they were trained in. state: of state.json."""
    tensors, model, saved = head_tensors(engine), engine.model, state["model"]
    for name, value in values.items():
        tensors[name].copy_(value)
    engine.heads.noise_unit = state["noise_unit"]
    model.config.target = saved["target"]
    model.config.scale_floor = model.abduction.scale_floor = saved["scale_floor"]


def _moments_of(shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    return {f"{name}.{key}": shape for name, shape in shapes.items() for key in MOMENTS}


def head_tensors(engine: Engine) -> dict[str, Tensor]:
    """Every parameter of the heads by name, frozen ones too (a calibrated C may be fixed)."""
    parts = engine.model.heads.items()
    return {f"{part}.{name}": p for part, module in parts for name, p in module.named_parameters()}
