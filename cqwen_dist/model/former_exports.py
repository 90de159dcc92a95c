"""Lets transformers load folders that an earlier version of this package exported."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter


def read_former_exports(model_type: str) -> None:
    """Earlier exports have b_reg and a scalar C of shape []; now they have shape [1], which DeepSpeed needs."""
    names = ("action.reg_bias", "action.threshold")
    converters: list[Any] = [WeightConverter(name, name, operations=[_InTheShapeOfTheModel()]) for name in names]
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)


class _InTheShapeOfTheModel(ConversionOps):
    """Gives a tensor of one entry the shape of the model's parameter."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **told: Any
    ) -> dict[str, Any]:
        (found,) = input_dict.values()
        tensor = found[0] if isinstance(found, list) else found
        if tensor.numel() == 1 and told.get("model") is not None:
            tensor = tensor.reshape(told["model"].get_parameter(told["full_layer_name"]).shape)
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return self  # a saved folder has the model's shapes
