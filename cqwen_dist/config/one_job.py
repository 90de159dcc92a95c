"""Which configs can train in one job on one base (`training.together`; no torch)."""

from collections.abc import Sequence
from pathlib import Path

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.reading import flat, load_config
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
