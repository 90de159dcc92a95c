"""The runs of one job on one base (`training.together`), and of a sweep: a config, and the keys whose values are tried.

Needs no torch.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from cqwen_dist.config import yaml_text
from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.config.fields import Count, Positive, Real, Section
from cqwen_dist.config.reading import flat, given_config, load_config
from cqwen_dist.config.schema import Config

# Keys of the base, its copy in memory and the ranks
SHARED = (
    *("model.name_or_path", "model.architecture", "model.tokenizer", "model.pretrain", "model.num_token_id"),
    *("model.trust_remote_code", "model.quantize", "train.precision", "parallel"),
)
BUILT = ("train.seed", "data")  # further keys of a base built from `model.architecture`


def load_configs(path: str | Path, words: Sequence[str] = ()) -> list[Config]:
    """The config of a run, or those of a job's runs, whose further files or run folders are among the words. The others
    are overrides of all. Raises `UserError`, also if the runs cannot train in one job."""
    more = [word for word in words if "=" not in word and (word.endswith((".yaml", ".yml")) or Path(word).exists())]
    overrides = [word for word in words if word not in more]
    configs = [load_config(each, overrides) for each in (path, *more)]
    refuse_apart(configs)
    return configs


def refuse_apart(configs: Sequence[Config]) -> None:
    """Raises `UserError` by key if these runs cannot train in one job, or if two of them have one folder."""
    first, *others = configs
    shared = SHARED + (BUILT if first.model.architecture else ())
    folders = [Path(config.run.dir).absolute() for config in configs]
    kept = flat(first.model_dump(mode="json"))
    for other, folder in zip(others, folders[1:], strict=True):
        if folders.count(folder) > 1:
            raise UserError("run.dir", other.run.dir, "a folder of its own for each run of a job")
        found = flat(other.model_dump(mode="json"))
        for key in {**kept, **found}:
            if kept.get(key) != found.get(key) and f"{key}.".startswith(tuple(f"{name}." for name in shared)):
                why = ", from which the run builds its base" if key.startswith(BUILT) else ""
                allowed = f"{kept.get(key)!r}, as in {first.run.dir}: the runs of a job share their base{why}"
                raise UserError(key, found.get(key), allowed, other.run.dir)


class Range(Section):
    """Values from low to high; whole numbers if both are."""

    low: Real
    high: Real
    log: bool = False

    def draw(self, chance: random.Random) -> float:
        """A value, uniform in it or in its logarithm."""
        ends = [math.log(end) if self.log else end for end in (self.low, self.high)]
        value = chance.uniform(*ends)
        value = math.exp(value) if self.log else value
        return round(value) if float(self.low).is_integer() and float(self.high).is_integer() else float(f"{value:.4g}")


class Sweep(Section):
    """A sweep's file."""

    config: str
    keys: dict[str, list[Any] | Range] = Field({})
    points: list[dict[str, Any]] = Field([])
    draws: Positive | None = None
    seed: Count = 0
    by: str = "eval/reg_mdae"
    """Metric of an evaluation that decides."""
    halving: bool = True
    """Stop the worse half at an evaluation, and again."""

    def settings(self) -> list[dict[str, Any]]:
        """The keys of each point."""
        if self.draws is not None:
            chance = random.Random(self.seed)
            every = [
                {k: chance.choice(v) if isinstance(v, list) else v.draw(chance) for k, v in self.keys.items()}
                for _ in range(self.draws)
            ]
        else:
            lists = [values if isinstance(values, list) else [] for values in self.keys.values()]
            every = [dict(zip(self.keys, values, strict=True)) for values in product(*lists)] if self.keys else []
        return [*every, *self.points]


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> tuple[Sweep, list[Config]]:
    """A sweep and its runs, in folders 0, 1, ... of its config's run.dir. overrides: of all. Raises `UserError`."""
    try:
        sweep = Sweep.model_validate(yaml_text.parse(path.read_text(encoding="utf-8"))[0])
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise UserError(".".join(map(str, wrong["loc"])) or "sweep", wrong["input"], wrong["msg"], str(path)) from None
    except (OSError, ValueError) as error:
        raise UserError("sweep", str(path), f"a YAML file ({reason_of(error)})") from None
    for key, values in sweep.keys.items():
        fits = isinstance(values, list) or (
            sweep.draws and values.high > values.low and (values.low > 0 or not values.log)
        )
        if not fits:
            raise UserError(f"keys.{key}", Said("a range"), "low below high (above 0 if log), and draws", str(path))
    base, configs = load_config(path.parent / sweep.config, overrides), list[Config]()
    for i, point in enumerate(sweep.settings()):
        name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
        own = {"run.dir": str(Path(base.run.dir) / str(i)), "run.name": name}
        own |= {"run.mirror": f"{base.run.mirror.rstrip('/')}/{i}"} if base.run.mirror else {}
        configs.append(given_config(base, {**own, **point}))
    if len(configs) < 2:
        raise UserError("keys", Said(f"{len(configs)} points"), "two or more", str(path))
    refuse_apart(configs)
    return sweep, configs
