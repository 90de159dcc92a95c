"""cqwen_dist: distributed LoRA fine-tuning of CausalQwen.

from cqwen_dist import train, evaluate, predict, counterfactual, load  # docs/python.md
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cqwen_dist.api import (
        Callback,
        CallbackError,
        Config,
        Moment,
        Stage,
        Stopped,
        TrainResult,
        UserError,
        counterfactual,
        counterfactual_rows,
        evaluate,
        load,
        predict,
        train,
    )
    from cqwen_dist.model import CausalQwenModel

__version__ = "0.1.0"
__all__ = ["Callback", "CallbackError", "Config", "Moment", "Stage", "Stopped", "TrainResult", "UserError"]
__all__ += ["CausalQwenModel", "counterfactual", "counterfactual_rows", "evaluate", "load", "predict"]
__all__ += ["train"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import cqwen_dist` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "CausalQwenModel":
        from cqwen_dist.model import CausalQwenModel

        return CausalQwenModel
    from cqwen_dist import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
