"""A sweep: a config, and the keys whose values are tried (docs/running.md; no torch)."""

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
from cqwen_dist.config.one_job import refuse_apart
from cqwen_dist.config.reading import given_config, load_config
from cqwen_dist.config.schema import Config


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
