"""The sizes of a base model and its number of parameters, without building it.

H hidden, I intermediate, A attention heads, K key-value heads, D head size, L layers, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.bases import check_model_type, rows_with_number
from cqwen_dist.config.errors import Said

# What transformers takes for a key that is left out.
_COMMON = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
_QWEN = {**_COMMON, "vocab_size": 151936, "intermediate_size": 22016}
DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "llama": {**_COMMON, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {**_COMMON, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8},
}
MISTRAL_WINDOW = 4096

# Public base models by hub name, as in their config.json: planning and measuring download nothing.
_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"),
)
_SIZES: dict[str, tuple[str, int, int, int, int, int, int, bool, int]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 151_936, 896, 4_864, 24, 14, 2, True, 32_768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 151_936, 1_536, 8_960, 28, 12, 2, True, 32_768),
    "Qwen/Qwen2.5-3B": ("qwen2", 151_936, 2_048, 11_008, 36, 16, 2, True, 32_768),
    "Qwen/Qwen2.5-7B": ("qwen2", 152_064, 3_584, 18_944, 28, 28, 4, False, 32_768),
    "Qwen/Qwen2.5-14B": ("qwen2", 152_064, 5_120, 13_824, 48, 40, 8, False, 32_768),
    "Qwen/Qwen2.5-32B": ("qwen2", 152_064, 5_120, 27_648, 64, 40, 8, False, 32_768),
    "Qwen/Qwen2.5-72B": ("qwen2", 152_064, 8_192, 29_568, 80, 64, 8, False, 32_768),
    "Qwen/Qwen3-0.6B-Base": ("qwen3", 151_936, 1_024, 3_072, 28, 16, 8, True, 32_768),
    "Qwen/Qwen3-1.7B-Base": ("qwen3", 151_936, 2_048, 6_144, 28, 16, 8, True, 32_768),
    "Qwen/Qwen3-4B-Base": ("qwen3", 151_936, 2_560, 9_728, 36, 32, 8, True, 32_768),
    "Qwen/Qwen3-8B-Base": ("qwen3", 151_936, 4_096, 12_288, 36, 32, 8, False, 32_768),
    "Qwen/Qwen3-14B-Base": ("qwen3", 151_936, 5_120, 17_408, 40, 40, 8, False, 32_768),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 49_152, 576, 1_536, 30, 9, 3, True, 8_192),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 49_152, 960, 2_560, 32, 15, 5, True, 8_192),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 49_152, 2_048, 8_192, 24, 32, 32, True, 8_192),
    "meta-llama/Llama-3.2-1B": ("llama", 128_256, 2_048, 8_192, 16, 32, 8, True, 131_072),
    "meta-llama/Llama-3.2-3B": ("llama", 128_256, 3_072, 8_192, 28, 24, 8, True, 131_072),
    "meta-llama/Llama-3.1-8B": ("llama", 128_256, 4_096, 14_336, 32, 32, 8, False, 131_072),
    "meta-llama/Llama-3.1-70B": ("llama", 128_256, 8_192, 28_672, 80, 64, 8, False, 131_072),
    "mistralai/Mistral-7B-v0.3": ("mistral", 32_768, 4_096, 14_336, 32, 32, 8, False, 32_768),
}


@dataclass(frozen=True)
class Architecture:
    """The sizes that decide parameters and activations."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    window: int | None  # how far attention looks back; None: not limited

    @classmethod
    def of(cls, found: dict[str, Any]) -> Architecture:
        """From a transformers config. Raises `UserError` for what cannot be a base."""
        kind = found.get("model_type")
        check_model_type(kind, "model.architecture.model_type")
        defaults = DEFAULTS[str(kind)]
        size = {key: _size(found, key, default) for key, default in defaults.items() if key != "num_key_value_heads"}
        heads = size["num_attention_heads"]
        # null means as many as heads; so does a missing key for a Llama
        as_heads = "num_key_value_heads" in found or kind == "llama"
        kv_heads = _size(found, "num_key_value_heads", heads if as_heads else defaults["num_key_value_heads"])
        return cls(
            model_type=str(kind),
            vocab=size["vocab_size"],
            hidden=size["hidden_size"],
            intermediate=size["intermediate_size"],
            layers=size["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_size(found, "head_dim", defaults.get("head_dim") or max(1, size["hidden_size"] // heads)),
            tied=bool(found.get("tie_word_embeddings", False)),
            attention_bias=bool(found.get("attention_bias", False)) and kind in ("qwen3", "llama"),
            mlp_bias=bool(found.get("mlp_bias", False)) and kind == "llama",
            window=found.get("sliding_window", MISTRAL_WINDOW) if kind == "mistral" else None,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Every linear map of a layer by name: (in, out, has a bias)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv_bias = self.attention_bias or self.model_type == "qwen2"
        return {
            "q_proj": (self.hidden, q, qkv_bias),
            "k_proj": (self.hidden, kv, qkv_bias),
            "v_proj": (self.hidden, kv, qkv_bias),
            "o_proj": (q, self.hidden, self.attention_bias),
            "gate_proj": (self.hidden, self.intermediate, self.mlp_bias),
            "up_proj": (self.hidden, self.intermediate, self.mlp_bias),
            "down_proj": (self.intermediate, self.hidden, self.mlp_bias),
        }

    @property
    def layer_parameters(self) -> int:
        """One layer: its linear maps, two norms, and Qwen3's norms of q and k."""
        linear = sum(rows * columns + bias * columns for rows, columns, bias in self.linears.values())
        return linear + 2 * self.hidden + (2 * self.head_dim if self.model_type == "qwen3" else 0)

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
        """The whole base model as transformers builds it; a tied head counts once."""
        return self.backbone_parameters + (1 if self.tied else 2) * self.embedding_parameters

    def lora_parameters(self, r: int, target_modules: list[str] | str, dora: bool = False) -> int:
        """Adapters of rank r: r (in + out) for each target, and with DoRA its out magnitudes."""
        names = list(self.linears) if target_modules == "all-linear" else list(target_modules)
        sizes = (self.linears[name] for name in dict.fromkeys(names))
        return self.layers * sum(r * (columns + rows) + dora * rows for columns, rows, _ in sizes)


def _size(found: dict[str, Any], key: str, default: int) -> int:
    value = found.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"model.architecture.{key}", value, "a whole number of at least 1")
    return value


def read_architecture(config: Config) -> dict[str, Any]:
    """The transformers config of the run's base model, its vocabulary with the rows for <NUM>. Raises `UserError`.

    It comes from model.architecture, from config.json in the model's folder, or from a public model's name.
    """
    if config.model.architecture is not None:
        return config.model.architecture
    found = _read(config)
    number, rows = config.model.num_token_id, Architecture.of(found).vocab
    used = _rows_in_use(Path(config.tokenizer_source).expanduser() / "tokenizer.json")
    if used is None and found["model_type"] in ("llama", "mistral"):
        used = rows  # public Llamas and Mistrals use every row
    if used is None:
        return found
    return {**found, "vocab_size": rows_with_number(rows, used, used if number is None else number)}


def known_architecture(name: str) -> dict[str, Any] | None:
    """The transformers config of a public base model (its -Instruct sibling's is the same), or None."""
    found = _SIZES.get(name) or _SIZES.get(name.removesuffix("-Instruct"))
    if found is None:
        return None
    window = {"sliding_window": None} if found[0] == "mistral" else {}
    return {**dict(zip(_KEYS, found, strict=True)), **window}


def _rows_in_use(file: Path) -> int | None:
    """Rows that a tokenizer uses; None without a readable file."""
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
