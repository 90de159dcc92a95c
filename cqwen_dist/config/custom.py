"""User classes, named in a config by import path, `package.module:Name`."""

import importlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cqwen_dist.config.errors import Said, UserError

FORM = "a class as package.module:Name"
TRUST = "CQWEN_TRUST_REMOTE_CODE"  # 1: allow code named by a run or an export
_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def import_path(value: str) -> str:
    """Check only the form. Raises ValueError, as schema validators do."""
    if _PATH.fullmatch(value) is None:
        raise ValueError(FORM)
    return value


def source_of(value: str | None) -> Path | None:
    """The file of the module that an import path names; None for any other value, or without such a file."""
    form = _PATH.fullmatch(value or "")
    try:
        spec = find_spec(form[1]) if form else None
    except Exception:  # a parent package may raise anything; `find_custom` reports it
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def find_custom(key: str, path: str, outside: str | Path = "") -> Any:
    """Import the class at an import path. Raises `UserError` by key if this fails.

    outside: a folder, such as a checkpoint or export, that modules must not come from, even if sys.path contains it.
    """
    form = _PATH.fullmatch(path)
    if form is None:
        raise UserError(key, path, FORM)
    parts, module = form[1].split("."), None
    try:
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            # Check where each package lies before importing it: importing runs its code.
            spec = find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"no module {name}")
            places = [spec.origin, *(spec.submodule_search_locations or ())]
            if outside and any(Path(p).resolve().is_relative_to(Path(outside).resolve()) for p in places if p):
                raise UserError(key, path, f"a module that does not lie in {outside}")
            module = importlib.import_module(name)
        return getattr(module, form[2])
    except UserError:
        raise
    except Exception as error:  # user code can raise anything
        raise unusable(key, path, error, f"{FORM}, installed or below a folder in PYTHONPATH") from error


def find_loaded(key: str, path: str, folder: str | Path, others: str = "") -> Any:
    """`find_custom` for a loaded folder. Imports only if the user trusts named code. Raises `UserError`.

    others: other values allowed for the key, for the error.
    """
    if os.environ.get(TRUST) != "1":
        raise UserError(key, path, f"{others}{TRUST}=1, which lets a model run code that it names")
    return find_custom(key, path, folder)


def unusable(key: str, path: str, error: object, allowed: str) -> UserError:
    """Error for a class that exists but fails, with its error (or a check's) in one line."""
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    return UserError(key, Said(f"{path}: {kind}{' '.join(str(error).split())}"), allowed)
