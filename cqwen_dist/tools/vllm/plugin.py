"""Called by vLLM in each of its processes (entry point `vllm.general_plugins`): CausalQwen is one of its models.

prompt ids, numbers --engine--> vLLM's scheduler --> `request_numbers`: values by request and position
                                                 --> `paged_model`: embedding, vLLM's transformer, our heads
ids by vLLM's outputs, numbers by a call to the worker <--
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.model.configuration import CausalQwenConfig

ARCHITECTURE = "CausalQwenForCausalLM"
NUMBERS = "cqwen_dist.tools.vllm.request_numbers"


class VllmConfigOfModel(CausalQwenConfig):
    """vLLM asks for the part of the config that describes the transformer. further: as `configs_of`."""

    further = ()

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        return self.base_config


def configs_of(config: Any) -> list[Any]:
    """The config of each run in an engine. config: the first; `further`: (folder, config as a dict) of the others."""
    return [config, *(CausalQwenConfig.from_dict(each, name_or_path=folder) for folder, each in config.further)]


class VllmRules:
    """The vLLM settings that a CausalQwen needs."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """vLLM has this step for pooling models."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Set the options that numbers need. Raises `UserError` for options that exclude them."""
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        architecture(config.base["model_type"]).require("vllm", "--engine", "vllm")
        runs, gpus, one = configs_of(config), parallel.tensor_parallel_size, "of cqwen export --merge, served alone"
        wide, dora = max(run.wide for run in runs), any((run.lora or {}).get("dora") for run in runs)
        for key, found, fits, allowed in (
            ("model.wide", wide, not wide, "0: vLLM has no place for its state; cqwen serve has"),
            ("model.lora.dora", dora, not dora, f"false, or a folder {one}"),
            ("tensor_parallel_size", gpus, gpus == 1 or not any(run.lora for run in runs), f"1, or a folder {one}"),
            ("speculative_config", "set", vllm_config.speculative_config is None, "none: a draft has no values"),
            ("pipeline_parallel_size", parallel.pipeline_parallel_size, parallel.pipeline_parallel_size == 1, "1"),
            ("VLLM_USE_V2_MODEL_RUNNER", Said("1"), not vllm_config.use_v2_model_runner, "0"),
        ):
            if not fits:
                raise UserError(key, found, allowed)
        # vLLM finds compiled layers of an earlier engine by a hash, in which it has the base's config, but not ours
        vllm_config.additional_config = {**vllm_config.additional_config, "adapters": [run.lora for run in runs]}
        # A block of the cache is found by its ids, and <NUM> has the same id for every value
        vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.model_config.logits_processors = [f"{NUMBERS}:RequestNumbers"]
        parallel.worker_extension_cls = f"{NUMBERS}.NumbersWorker"
        # Values are looked up in Python before the layers, so a CUDA graph may contain layers only
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
            from vllm.config import CUDAGraphMode

            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def register() -> None:
    """Make CausalQwen known to vLLM. Imports no model, so it costs other models nothing."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    ModelRegistry.register_model(ARCHITECTURE, "cqwen_dist.tools.vllm.paged_model:PagedCausalQwen")
    _CONFIG_REGISTRY[CausalQwenConfig.model_type] = VllmConfigOfModel
    MODELS_CONFIG_MAP[ARCHITECTURE] = VllmRules
