"""A run's state, to and from a checkpoint: where the run is, and all that trains, in whole tensors and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, refuse_exchanged
from cqwen_dist.checkpoint.saving import About
from cqwen_dist.checkpoint.tensors import refuse_strange
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.lora import is_lora
from cqwen_dist.run.files import START_TENSORS
from cqwen_dist.training.assembly import Run
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION
from cqwen_dist.training.moments import MOMENTS
from cqwen_dist.training.parameter_groups import has_rows
from cqwen_dist.training.zero.engine import Engine
from cqwen_dist.training.zero.zero_state import FeatureState


@dataclass
class Place:
    """Where a run is, as saved in a checkpoint. The same on every rank."""

    step: int = 0
    stage: str = ""
    loader: dict[str, int] = field(default_factory=dict)  # where the next step's samples come from
    figures: dict[str, Any] = field(default_factory=dict)  # metrics of the last evaluation
    due: dict[str, Any] | None = None  # the record of `step`, where its evaluation was cut short; may hold tensors
    evaluated: bool = False  # whether the metrics are of `step`
    exchanged: list[str] = field(default_factory=list)  # inputs that were exchanged since (`run.accept`)


def save(run: Run, place: Place) -> None:
    """Save a checkpoint of all that trains and of where the run is. Collective over the world."""
    evaluated = place.figures if place.evaluated else {}
    about = About(place.step, place.stage, evaluated, run.config.model_dump(mode="json"), run.config.base_folder)
    run.saver.save(lambda: _collect(run, place), about)


def restore(run: Run, folder: Path) -> Place:
    """Restore what `save` saved, on any ranks; returns where the run continues. Raises `UserError`."""
    first = run.model.action.vocab_start
    kept = [(first + start, first + stop) for start, stop in run.engine.heads.of_rows.kept]
    found = load_checkpoint(folder, row_range(run.model), kept)
    state = found.state
    exchanged = refuse_exchanged(state.get("inputs", {}), run.inputs, run.config.run.accept, folder)
    _restore(run.engine, found, folder)
    place = Place(**{key: state[key] for key in vars(Place()) if key in state})
    place.exchanged = exchanged
    if "eval" in exchanged:  # what was measured on the texts before is not compared with these
        state |= {"base": {}, "schedule": {**state["schedule"], "best": None, "waited": 0}}
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


def _collect(run: Run, place: Place) -> TrainState:
    """All that trains and where the run is, ready to be saved. Collective."""
    engine = run.engine
    features = engine.feature_state()
    moments, steps = engine.heads.moments()
    heads, rows = _split(head_tensors(engine))
    head_moments, row_moments = _split(moments)
    first, (start, stop) = engine.model.action.vocab_start, engine.heads.of_rows.written
    return TrainState(
        features=features.parameters,
        feature_moments=features.moments,
        heads=heads,
        head_moments=head_moments,
        rows=rows,
        row_moments=row_moments,
        row_range=row_range(engine.model),
        moment_range=(first + start, first + stop),
        state={
            **vars(place),
            "schedule": run.schedule.state_dict(),
            "constraint": run.constraint.state_dict(),
            "norms": engine.usual.seen,
            "inputs": run.inputs,
            **run.evaluations.state_dict(),
            "figures": {**place.figures, **run.evaluations.factors()},
            "feature_steps": features.steps,
            "head_steps": steps,
            "noise_unit": engine.heads.noise_unit,
            "model": engine.model.config.to_dict(),
        },
    )


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(replicated, with rows): parameters of the heads, or moments of them."""
    rows = {name: tensor for name, tensor in tensors.items() if has_rows(name, tensor.shape)}
    return {name: tensor for name, tensor in tensors.items() if name not in rows}, rows


def _restore(engine: Engine, found: TrainState, source: Path) -> None:
    """Put a checkpoint's tensors, saved on any ranks, back into the engine. source: where it was read, for errors."""
    state, shapes = found.state, engine.feature_shapes()
    features = FeatureState(found.features, found.feature_moments, state["feature_steps"])
    heads, moments = {**found.heads, **found.rows}, {**found.head_moments, **found.row_moments}
    if state["model"]["lora"] is None:  # a stage that trains adapters was appended since: they begin now
        for saved, present in zip(features[:2], engine.feature_state()[:2], strict=True):
            saved.update({name: value for name, value in present.items() if is_lora(name)})
    stepped = {name: shape for name, shape in head_shapes(engine).items() if name in state["head_steps"]}
    refuse_strange(heads, head_shapes(engine), source)
    kept = sum(stop - start for start, stop in engine.heads.of_rows.kept)
    held = {name: torch.Size((kept, *shape[1:])) if has_rows(name, shape) else shape for name, shape in stepped.items()}
    refuse_strange(moments, _moments_of(held), source)
    refuse_strange(features.parameters, shapes, source)
    refuse_strange(features.moments, _moments_of(shapes), source)
    load_heads(engine, heads, state)
    engine.heads.load_moments(moments, state["head_steps"])
    engine.load_feature_state(features)


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


def head_shapes(engine: Engine) -> dict[str, torch.Size]:
    """Shapes of the heads' parameters on this rank by name; a rank may have no rows."""
    return {name: tensor.shape for name, tensor in head_tensors(engine).items() if tensor.numel()}
