"""Loads a base model under ZeRO-3, module by module, so that no rank needs memory for the full model.

The architecture is built without weights. Rank 0 reads one module at a time from the safetensors files, and DeepSpeed
broadcasts and partitions the weights. So each rank needs memory for its share and one module. The output head is not
built; its rows are read by range on demand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.architectures import ARCHITECTURES, BaseArchitecture
from cqwen_dist.model.base_loading import base_config, base_folder_of, mean_row, record_added_rows
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.parallel.collectives import main_rank_first, naming
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.training.zero.patches import join_deepspeed
from cqwen_dist.training.zero.settings import deepspeed_config


class WeightFiles:
    """Tensors in the safetensors files of a model, by name. Slicing a tensor reads it from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
        if index.is_file():
            self._files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise UserError("model.name_or_path", str(folder), f"a folder with {single.name}, or its index and parts")
        # A model that also reads images has its text part one level deeper
        self._names = {name.replace("model.language_model.", "model.", 1): name for name in self._files}

    def slice_of(self, name: str) -> Any:
        """A lazy tensor; `[:]` or `[a:b]` reads it. Raises `UserError` if it is missing."""
        if name not in self._names:
            raise UserError("model.name_or_path", f"no {name} in {self.folder}", "all weights of the architecture")
        own = self._names[name]
        with safe_open(self.folder / self._files[own], framework="pt") as file:
            return file.get_slice(own)

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """A whole tensor. All experts of a layer, a parameter of this shape, may be a tensor for each in the files."""
        folder, _, own = name.rpartition(".")
        if name in self._names or not folder.endswith(".experts"):
            return self.slice_of(name)[:]
        parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
        each = ([self.slice_of(f"{folder}.{i}.{part}.weight")[:] for part in parts] for i in range(shape[0]))
        return torch.stack([torch.cat(maps) for maps in each])

    def head(self, base: BaseArchitecture, tied: bool) -> Any:
        """The output head [V,H]; with tied weights, the token table. Raises `UserError` if it is missing."""
        return self.slice_of(base.table if tied and base.head not in self._names else base.head)


class WithMeanRows:
    """A lazy matrix [V,H] with added rows, each the mean of all rows in the file.

    dtype: dtype of the mean (default: that of the file).
    """

    def __init__(self, own: Any, rows: int, dtype: torch.dtype | None = None) -> None:
        self._own, self._dtype = own, dtype
        self._mean: Tensor | None = None
        self.own_rows, hidden = own.get_shape()
        self.shape = torch.Size((rows, hidden))

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(self.shape[0])
        own: Tensor = self._own[min(start, self.own_rows) : min(stop, self.own_rows)]
        added = stop - max(start, self.own_rows)
        if added <= 0:
            return own
        if self._mean is None:
            self._mean = mean_row(self._own, self.own_rows, self._dtype)
        return torch.cat([own, self._mean.to(self._dtype or own.dtype).to(own.dtype).expand(added, -1)])


def load_partitioned_base(
    name_or_path: str, config: Config, runtime: Runtime, rows_for: Callable[[int], int] | None = None
) -> tuple[PreTrainedModel, Any, Any]:
    """Load (base, lazy output head, lazy token table). Collective over the world. Raises `UserError`.

    config: the run's config, with ZeRO stage 3. rows_for: as in `load_base`.
    """
    dtype, code = dtype_of(config.train.precision), config.model.trust_remote_code
    main_rank_first(lambda: base_folder_of(name_or_path))  # one rank downloads it for all
    folder = base_folder_of(name_or_path)
    shape = base_config(name_or_path, code)
    names = ARCHITECTURES[shape.model_type]
    rows = shape.vocab_size if rows_for is None else rows_for(shape.vocab_size)
    files = WeightFiles(folder)
    head, table = files.head(names, shape.tie_word_embeddings), files.slice_of(names.table)
    if rows > shape.vocab_size:
        head, table = WithMeanRows(head, rows), WithMeanRows(table, rows, dtype)
        record_added_rows(shape, rows)

    def read(name: str, value: Tensor) -> None:
        whole: Tensor = table[:] if name == names.table else files.tensor(name, value.shape)
        if whole.shape != value.shape:
            raise UserError("model.name_or_path", f"{name} of shape {tuple(whole.shape)}", f"{tuple(value.shape)}")
        value.copy_(whole)

    return partitioned(shape, config, runtime, read), head, table


def partitioned(shape: Any, config: Config, runtime: Runtime, fill: Callable[[str, Tensor], None]) -> PreTrainedModel:
    """Build a base of this architecture, without output head, module by module. Collective over the world.

    fill: writes the parameter of a name into a tensor on the device; called on rank 0 only.
    """
    dtype, code = dtype_of(config.train.precision), config.model.trust_remote_code
    settings = deepspeed_config(config, runtime.world_size, 1)
    join_deepspeed()
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=dtype, trust_remote_code=code)
    base.lm_head = None
    for name, module in reversed([*base.model.named_modules(prefix="model")]):  # a module's parts before itself
        own = dict(module.named_parameters(recurse=False))
        if own:
            # Other ranks pass memory that DeepSpeed's broadcast fills
            values = {
                f"{name}.{key}": torch.empty_like(p, dtype=dtype, device=runtime.device) for key, p in own.items()
            }

            def write(values: dict[str, Tensor] = values) -> None:
                for name, value in values.items():
                    fill(name, value)

            main_rank_first(write)
            for key, value in zip(own, values.values(), strict=True):
                setattr(module, key, nn.Parameter(value, requires_grad=False))
            with naming("DeepSpeed's partitioning"):
                deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=dtype)
    return base
