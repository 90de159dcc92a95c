"""transformers' text-generation pipeline with the values of numbers; `cqwen_dist.auto` registers it."""

import copy
from functools import partial
from typing import Any

import transformers
from packaging import version
from transformers import GenerationConfig, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.streaming import as_prompt, gap
from cqwen_dist.heads.intervals import LEVELS


class CausalQwenTextGeneration(TextGenerationPipeline):
    """`pipeline("text-generation", ...)` for a CausalQwen. For other models it creates the standard pipeline.

    The standard pipeline passes and decodes ids without values; this one keeps values with ids. Numbers are rounded by
    their uncertainty, unless `digits` is given. Each record also has `numbers`: value and intervals by level of each
    generated number.
    """

    # transformers' default is sampling at temperature 0.7; mode standard has no temperature
    _default_generation_config = GenerationConfig(max_new_tokens=256)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = getattr(kwargs.get("model", next(iter(args), None)), "config", None)  # None: a copy is made
        if getattr(config, "model_type", "causal_qwen") != "causal_qwen":
            return TextGenerationPipeline(*args, **kwargs)
        if version.parse(transformers.__version__) < version.parse("5.24"):  # it fills in options that nobody has set
            raise UserError("pipeline", f"transformers {transformers.__version__}", "5.24 or newer, or model.generate")
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self.tokenizer, "num_token_id"):
            allowed = "the model's own, by AutoTokenizer (without cqwen_dist: and trust_remote_code=True)"
            raise UserError("tokenizer", type(self.tokenizer).__name__, allowed)

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:  # type: ignore[override]  # as the parent's
        values = model_inputs.pop("numeric_values")[:, -model_inputs["input_ids"].shape[1] :]  # a cut prompt's
        options = {"digits": "auto", **generate_kwargs, "numeric_values": values, "return_dict_in_generate": True}
        return super()._forward(model_inputs, **options)

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """One record per text, as in the standard pipeline."""
        start = model_outputs["input_ids"].shape[-1]
        numbers_of = [model_outputs.pop(name)[0] for name in ("numeric_values", "numeric_intervals")]
        rows = zip(model_outputs["generated_sequence"][0], *numbers_of, strict=True)
        tokenizer: Any = copy.copy(self.tokenizer)
        prompt = model_outputs["prompt_text"]  # or a chat
        tokenizer.reader = as_prompt(tokenizer.reader, str(getattr(prompt, "messages", prompt)), ())
        records = []
        for row, (ids, values, ends) in enumerate(rows):
            one = copy.copy(self)  # other threads use this pipeline too
            one.tokenizer = reading = copy.copy(tokenizer)
            before = gap(ids, start, tokenizer.num_token_id)
            reading.decode = partial(_decoded, tokenizer, before, values[start:])
            own = {k: v if k in ("input_ids", "prompt_text") else v[:, row : row + 1] for k, v in model_outputs.items()}
            at = [i for i in range(start, len(ids)) if not ends[i].isnan().any()]
            levels = [f"{level:g}" for level in LEVELS]
            intervals = {i: dict(zip(levels, map(tuple, ends[i].tolist()), strict=True)) for i in at}
            numbers = [{"value": float(values[i]), "intervals": intervals[i]} for i in at]
            found = super(CausalQwenTextGeneration, one).postprocess(own, *args, **kwargs)
            records += [{**record, "numbers": numbers} for record in found]
        return records


def _decoded(tokenizer: Any, before: str, values: Any, *ids: Any, **given: Any) -> str:
    return before + str(tokenizer.decode(*ids, values=values, **given))


def register_pipeline() -> None:
    """Register CausalQwen for `pipeline("text-generation", ...)`."""
    PIPELINE_REGISTRY.supported_tasks["text-generation"]["impl"] = CausalQwenTextGeneration
