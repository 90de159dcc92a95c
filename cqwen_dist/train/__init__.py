"""`cqwen_dist.train(config, ...)` trains a run: see `help(cqwen_dist.api.train)`. This folder is what it is made of."""

import sys
from types import ModuleType
from typing import Any

import cqwen_dist


class _Train(ModuleType):
    """Python binds the name of a folder once anything in it is imported: so the folder passes the call on."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return cqwen_dist.__getattr__("train")(*args, **options)


sys.modules[__name__].__class__ = _Train
