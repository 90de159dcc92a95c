"""Sizes and parameter counts of a base model, without building it.

Letters: H hidden, I intermediate, A attention heads, K key-value heads, D head size, L layers, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config.architectures import ARCHITECTURES, BaseArchitecture, architecture
from cqwen_dist.config.bases import rows_with_number
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.schema import Config
from cqwen_dist.sizes.flops import Work


@dataclass(frozen=True)
class Architecture:
    """The sizes that determine parameters and activations."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    biases: frozenset[str]  # config keys that give linear maps a bias
    window: int | None  # attention window; None: unlimited

    @classmethod
    def of(cls, found: dict[str, Any]) -> Architecture:
        """From a transformers config. Raises `UserError` for a model that cannot be a base."""
        kind = architecture(found.get("model_type"), "model.architecture.model_type")
        defaults = kind.defaults
        size = {key: _size(found, key, default) for key, default in defaults.items() if key != "num_key_value_heads"}
        heads = size["num_attention_heads"]
        # null means the number of attention heads, and so does a missing key without a default
        kv_heads = heads if "num_key_value_heads" in found else defaults.get("num_key_value_heads", heads)
        return cls(
            model_type=kind.model_type,
            vocab=size["vocab_size"],
            hidden=size["hidden_size"],
            intermediate=size["intermediate_size"],
            layers=size["num_hidden_layers"],
            heads=heads,
            kv_heads=_size(found, "num_key_value_heads", kv_heads),
            head_dim=_size(found, "head_dim", defaults.get("head_dim") or max(1, size["hidden_size"] // heads)),
            tied=bool(found.get("tie_word_embeddings", False)),
            biases=frozenset(m.bias for m in kind.linears.values() if isinstance(m.bias, str) and found.get(m.bias)),
            window=found.get("sliding_window", kind.window) if kind.window else None,
        )

    @property
    def kind(self) -> BaseArchitecture:
        """The entry in `config.architectures`."""
        return ARCHITECTURES[self.model_type]

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """The linear maps of a layer by name: (in, out, has a bias)."""
        size = self._sizes
        return {
            name: (size[m.rows], size[m.columns], m.bias is True or m.bias in self.biases)
            for name, m in self.kind.linears.items()
        }

    @property
    def read_widths(self) -> dict[str, int]:
        """The width of each input tensor of the linear maps of a layer."""
        return {m.reads: self._sizes[m.rows] for m in self.kind.linears.values()}

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes by the names that architectures use for linear maps."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"hidden": self.hidden, "intermediate": self.intermediate, "queries": queries, "keys": keys}

    @property
    def layer_parameters(self) -> int:
        """One layer: linear maps, two norms, and norms of q and k if it has them."""
        linear = sum(rows * columns + bias * columns for rows, columns, bias in self.linears.values())
        return linear + 2 * self.hidden + 2 * self.head_dim * self.kind.qk_norm

    @property
    def backbone_parameters(self) -> int:
        """All layers and the last norm, without the token embedding."""
        return self.layers * self.layer_parameters + self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The token embedding, [V, H]."""
        return self.vocab * self.hidden

    @property
    def base_parameters(self) -> int:
        """The base model as transformers builds it; a tied head counts once."""
        return self.backbone_parameters + (1 if self.tied else 2) * self.embedding_parameters

    def lora_parameters(self, r: int, target_modules: list[str] | str, dora: bool = False) -> int:
        """Adapters of rank r: r (in + out) for each target, and out magnitudes with DoRA."""
        names = list(self.linears) if target_modules == "all-linear" else list(target_modules)
        sizes = (self.linears[name] for name in dict.fromkeys(names))
        return self.layers * sum(r * (columns + rows) + dora * rows for columns, rows, _ in sizes)

    def work(self, adapters: int, words: int, causal: int) -> Work:
        """Operations of a model on this base with so many adapter parameters. words: C_w. causal: C."""
        matrices = self.layers * sum(rows * columns for rows, columns, _ in self.linears.values())
        attention = self.heads * self.head_dim
        return Work(matrices, adapters, self.layers, attention, self.hidden, causal, words, self.vocab)


def _size(found: dict[str, Any], key: str, default: int) -> int:
    value = found.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"model.architecture.{key}", value, "a whole number of at least 1")
    return value


def read_architecture(config: Config) -> dict[str, Any]:
    """The transformers config of the run's base model, with added rows for <NUM>. Raises `UserError`.

    Read from model.architecture, from config.json in the model folder, or from a table of public models.
    """
    if config.model.architecture is not None:
        return config.model.architecture
    found = _read(config)
    base = Architecture.of(found)
    config.fit_to(base.model_type)
    number, rows = config.model.num_token_id, base.vocab
    used = _rows_in_use(Path(config.tokenizer_source).expanduser() / "tokenizer.json")
    if used is None and not base.kind.spare_rows:
        used = rows
    if used is None:
        return found
    return {**found, "vocab_size": rows_with_number(rows, used, used if number is None else number)}


def known_architecture(name: str) -> dict[str, Any] | None:
    """The transformers config of a public base model or its -Instruct version; None if unknown."""
    for kind in ARCHITECTURES.values():
        sizes = kind.public.get(name) or kind.public.get(name.removesuffix("-Instruct"))
        if sizes is not None:
            return {"model_type": kind.model_type, **sizes}
    return None


def _rows_in_use(file: Path) -> int | None:
    """Number of rows that a tokenizer uses; None without a readable file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        words = found["model"]["vocab"]
        ids = words.values() if isinstance(words, dict) else range(len(words))
        return 1 + max([*ids, *(token["id"] for token in found["added_tokens"])])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read(config: Config) -> dict[str, Any]:
    name = str(config.model.name_or_path)
    file = Path(name).expanduser() / "config.json"
    key, where = "model.name_or_path", str(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        known = known_architecture(name)
        if known is not None:
            return known
        raise UserError(key, name, "a folder with the model's config.json (planning downloads nothing)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(key, "no readable JSON", f"the model's config.json ({error})", where) from None
    if not isinstance(found, dict):
        raise UserError(key, found, "a JSON object", where)
    try:
        Architecture.of(found)
    except UserError as error:
        shown = Said(f"{error.key.removeprefix('model.architecture.')}: {error.found}")
        raise UserError(key, shown, error.allowed, where) from None
    return found


def feature_parameters(config: Config, architecture: dict[str, Any]) -> int:
    """Number of parameters that the engine trains (adapters, w_num, <NUM> row), without building the model."""
    base = Architecture.of(architecture)
    lora = config.model.lora
    adapters = base.lora_parameters(lora.r, lora.target_modules, lora.dora) if config.trains("lora") else 0
    return (2 + 2 * len(config.model.value_periods)) * base.hidden + adapters
