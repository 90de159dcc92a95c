"""Saves and restores the state of a run: its place, and all trained parameters with their moments."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, refuse_exchanged, refuse_strange
from cqwen_dist.checkpoint.saving import About
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.trainable import FEATURE_GROUPS, feature_group, is_lora, is_lora_b
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.run.files import START_TENSORS, let_read, written_whole
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.evaluation.number_metrics import CALIBRATION
from cqwen_dist.training.optim import CANDIDATE_UNIT, MOMENTS
from cqwen_dist.training.parameter_groups import has_rows
from cqwen_dist.training.run_parts import Run
from cqwen_dist.training.zero.engine import Engine
from cqwen_dist.training.zero.zero_state import FeatureState


@dataclass
class Place:
    """The place of a run, as saved in a checkpoint. Equal on all ranks."""

    step: int = 0
    stage: str = ""
    loader: dict[str, int] = field(default_factory=dict)  # data position of the next step
    figures: dict[str, Any] = field(default_factory=dict)  # metrics of the last evaluation
    due: dict[str, Any] | None = None  # the record of `step` if its evaluation was interrupted; may contain tensors
    evaluated: bool = False  # whether the metrics belong to `step`
    exchanged: list[str] = field(default_factory=list)  # inputs that have changed since (`run.accept`)


def save(run: Run, place: Place) -> None:
    """Save a checkpoint with all trained state and the place. Collective over the world."""
    evaluated = place.figures if place.evaluated else {}
    about = About(place.step, place.stage, evaluated, run.config.model_dump(mode="json"), run.config.base_folder)
    run.saver.save(lambda: _collect(run, place), about)


def restore(run: Run, folder: Path) -> Place:
    """Restore a checkpoint, saved on any number of ranks. Returns the place. Raises `UserError`."""
    # Each rank reads the moments of the rows that it steps now; the ranks of the save do not matter
    first = run.model.action.vocab_start
    kept = [(first + start, first + stop) for start, stop in run.engine.heads.of_rows.kept]
    found = load_checkpoint(folder, row_range(run.model), kept)
    state = found.state
    # A different tokenizer, base or data is refused before anything is loaded
    exchanged = refuse_exchanged(state["inputs"], run.inputs, run.config.run.accept, folder)
    parts = (found.features, found.feature_moments)
    missing = run.config.trained.difference(map(feature_group, parts[0]))
    if missing & FEATURE_GROUPS.keys():  # a stage that trains this group was appended later: it starts now
        for saved, present in zip(parts, run.engine.feature_state()[:2], strict=True):
            saved.update({name: value for name, value in present.items() if feature_group(name) in missing})
    elif run.model.config.lora is None and not any(parts[0][name].any() for name in filter(is_lora_b, parts[0])):
        for part in parts:  # that stage was taken out before they changed anything
            for name in filter(is_lora, [*part]):
                del part[name]
    _restore(run.engine, found, folder)
    place = Place(**{key: state[key] for key in vars(Place())})
    place.exchanged = exchanged
    if "eval" in exchanged:  # metrics on the old held-out texts are not comparable
        state |= {"base": {}, "schedule": {**state["schedule"], "best": None, "waited": 0}}
    # Checkpoints keep the interval factors among the figures
    factors = place.figures.pop(CALIBRATION, None)
    run.schedule.load_state_dict(state["schedule"], place.step)
    if (jump := run.schedule.jump(state["schedule"], place.step)) is not None:
        run.progress.say(jump)
    if run.config.constraint.mode != "off":
        load_start(run.constraint, run.folder / START_TENSORS, state["constraint"])
    run.engine.usual.seen = list(state["norms"])
    # A position in other texts has no meaning: these start a new epoch
    run.loaders.load_state_dict(state["loader"], "data" in exchanged)
    run.evaluations.load_state_dict(state, factors)
    return place


def save_start(constraint: Constraint, path: Path) -> None:
    """Write the start that the constraint compares with. One rank calls this."""
    tensors = {**constraint.tensors(), "adapted": torch.tensor(constraint.adapted)}
    with written_whole(path) as partial:
        save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, partial)
        let_read(partial)


def load_start(constraint: Constraint, path: Path, state: dict[str, Any]) -> None:
    """Restore the files of `save_start`, and the `state_dict`. Raises `UserError` if the file does not fit."""
    try:
        tensors = load_file(path)
        adapted = tensors.pop("adapted").reshape(())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        said = f"the start of the run cannot be read ({error}); copy the file back, or begin a new run with mode: off"
        raise UserError("loss.constraint", Said(said), "", str(path)) from None
    shapes = {name: value.shape for name, value in constraint.tensors().items()}
    refuse_strange(tensors, shapes, path, key="loss.constraint")
    constraint.load(tensors, bool(adapted), state)


def row_range(model: CausalModules) -> tuple[int, int]:
    """[start, stop) of this rank's vocabulary rows."""
    return model.action.vocab_start, model.action.vocab_start + model.action.rows


def _collect(run: Run, place: Place) -> TrainState:
    engine = run.engine
    features = engine.feature_state()
    moments, steps = engine.heads.moments()
    scalar = engine.model.action.scalar_threshold
    heads, rows = _split(head_tensors(engine), scalar)
    head_moments, row_moments = _split(moments, scalar)
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
            "candidate_unit": engine.heads.candidate_unit,
            "model": engine.model.config.to_dict(),
        },
    )


def _split(tensors: dict[str, Tensor], scalar: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rows = {name: tensor for name, tensor in tensors.items() if has_rows(name, scalar)}
    return {name: tensor for name, tensor in tensors.items() if name not in rows}, rows


def _restore(engine: Engine, found: TrainState, source: Path) -> None:
    state, shapes = found.state, engine.feature_shapes()
    features = FeatureState(found.features, found.feature_moments, state["feature_steps"])
    heads, moments = {**found.heads, **found.rows}, {**found.head_moments, **found.row_moments}
    stepped = {name: shape for name, shape in head_shapes(engine).items() if name in state["head_steps"]}
    # Check all names and shapes before loading any: a refused checkpoint must leave the engine unchanged
    refuse_strange(heads, head_shapes(engine), source)
    kept = sum(stop - start for start, stop in engine.heads.of_rows.kept)
    rows = {name for name in stepped if has_rows(name, engine.model.action.scalar_threshold)}
    held = {name: torch.Size((kept, *shape[1:])) if name in rows else shape for name, shape in stepped.items()}
    refuse_strange(moments, _moments_of(held), source)
    refuse_strange(features.parameters, shapes, source)
    refuse_strange(features.moments, _moments_of(shapes), source)
    load_heads(engine, heads, state)
    engine.heads.load_moments(moments, state["head_steps"])
    engine.load_feature_state(features)


@torch.no_grad()
def load_heads(engine: Engine, values: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Copy the heads of a checkpoint into the model, with the units of their training. state: from state.json."""
    tensors, model, saved = head_tensors(engine), engine.model, state["model"]
    for name, value in values.items():
        tensors[name].copy_(value)
    engine.heads.noise_unit = state["noise_unit"]
    engine.heads.candidate_unit = state.get("candidate_unit", CANDIDATE_UNIT)  # none before 30 November
    for name in ("target", "constants", "symbols", "calibration"):
        setattr(model.config, name, saved.get(name))
    model.config.scale_floor = model.abduction.scale_floor = saved["scale_floor"]


def _moments_of(shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    return {f"{name}.{key}": shape for name, shape in shapes.items() for key in MOMENTS}


def head_tensors(engine: Engine) -> dict[str, Tensor]:
    """All parameters of the heads by name, including frozen ones (a calibrated C may be fixed)."""
    parts = engine.model.heads.items()
    return {f"{part}.{name}": p for part, module in parts for name, p in module.named_parameters()}


def head_shapes(engine: Engine) -> dict[str, torch.Size]:
    """Shapes of the head parameters on this rank by name, without empty ones; a rank may have no rows."""
    return {name: tensor.shape for name, tensor in head_tensors(engine).items() if tensor.numel()}
