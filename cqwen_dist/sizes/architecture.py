"""Sizes and parameter counts of a base model, without building it.

Letters: H hidden, I intermediate, A attention heads, K key-value heads, D head size, L layers, V vocabulary.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cqwen_dist.config import Config, Said, UserError
from cqwen_dist.config.architectures import ARCHITECTURES, BaseArchitecture, architecture, text_part
from cqwen_dist.config.architectures.base_architecture import Block, sizes
from cqwen_dist.config.bases import rows_with_number
from cqwen_dist.sizes.flops import Work


class Map(NamedTuple):
    """A linear map of a layer, with its sizes."""

    name: str
    reads: str
    rows: int
    columns: int
    bias: bool

    @property
    def entries(self) -> int:
        """Number of matrix entries."""
        return self.rows * self.columns


def _entry(key: str) -> property:
    return property(lambda self: int(self.sizes[key]))


@dataclass(frozen=True)
class Architecture:
    """Sizes that determine parameters and activations."""

    model_type: str
    sizes: Mapping[str, int]  # by config key, plus derived sizes
    stack: tuple[tuple[int, tuple[Block, ...]], ...]  # (count, blocks) of each different layer
    tied: bool
    biases: frozenset[str]  # config keys that give linear maps a bias
    window: int | None  # attention window; None: unlimited

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Architecture":
        """From a transformers config. Raises `UserError` for a model that cannot be a base."""
        found = text_part(found)
        kind = architecture(found.get("model_type"), "model.architecture.model_type")
        found = {**dict.fromkeys(kind.biased, True), **found}
        found.setdefault("num_experts", found.get("num_local_experts"))  # the key that transformers writes
        keys = kind.defaults
        size = {key: _size(found, key, default) for key, default in keys.items() if key != "num_key_value_heads"}
        heads = size["num_attention_heads"]
        # null, or a missing key without a default: the number of attention heads
        kv_heads = heads if "num_key_value_heads" in found else keys.get("num_key_value_heads", heads)
        size["num_key_value_heads"] = _size(found, "num_key_value_heads", kv_heads)
        size["head_dim"] = _size(found, "head_dim", keys.get("head_dim") or max(1, size["hidden_size"] // heads))
        layers = kind.layers_of(found, size["num_hidden_layers"])
        stack = tuple((layers.count(layer), layer) for at, layer in enumerate(layers) if layers.index(layer) == at)
        named = {map.bias for _, layer in stack for block in layer for map in block.linears.values()}
        return cls(
            model_type=kind.model_type,
            sizes=size | _named_sizes(size),
            stack=stack,
            tied=bool(found.get("tie_word_embeddings", kind.tied)),
            biases=frozenset(key for key in named if isinstance(key, str) and found.get(key)),
            window=None if kind.window is None else found.get("sliding_window", kind.window) or None,
        )

    @property
    def kind(self) -> BaseArchitecture:
        """The entry in `config.architectures`."""
        return ARCHITECTURES[self.model_type]

    vocab, hidden, layers = _entry("vocab_size"), _entry("hidden_size"), _entry("num_hidden_layers")  # V, H, L
    heads, kv_heads = _entry("num_attention_heads"), _entry("num_key_value_heads")  # A, K
    head_dim = _entry("head_dim")  # D

    def maps(self, block: Block) -> list[Map]:
        """The linear maps of a block."""
        size = self.sizes
        return [
            Map(name, m.reads, size[m.rows], size[m.columns], m.bias is True or m.bias in self.biases)
            for name, m in block.linears.items()
        ]

    def reads(self, block: Block) -> dict[str, int]:
        """Width of each input of a block's linear maps."""
        return {each.reads: each.rows for each in self.maps(block)}

    def all_maps(self, names: Collection[str] | None = None) -> list[tuple[int, Map]]:
        """(number of layers, linear map). names: only maps with these names that can have adapters."""
        return [
            (count, each)
            for count, layer in self.stack
            for block in layer
            for each in self.maps(block)
            if names is None or (block.adapted and each.name in names)
        ]

    def tensors(self, layer: tuple[Block, ...]) -> list[int]:
        """Entries per parameter of a layer: matrices and biases, other parameters, norms."""
        found: list[int] = []
        for block in layer:
            for each in self.maps(block):
                found += [each.entries, *[each.columns] * each.bias]
            found += [prod(self.sizes[name] for name in sizes) for sizes in block.more.values()]
            found += [self.hidden] * block.norms
        return found

    @property
    def backbone_parameters(self) -> int:
        """All layers and the last norm, without the token embedding."""
        return sum(count * sum(self.tensors(layer)) for count, layer in self.stack) + self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The token embedding, [V, H]."""
        return self.vocab * self.hidden

    @property
    def base_parameters(self) -> int:
        """The base model as transformers builds it; a tied head counts once."""
        return self.backbone_parameters + (1 if self.tied else 2) * self.embedding_parameters

    @property
    def active_entries(self) -> int:
        """Matrix entries that multiply a token, over all layers; only the experts that it uses."""
        size, total = self.sizes, 0
        for count, layer in self.stack:
            for block in layer:
                total += count * sum(each.entries for each in self.maps(block))
                if block.kind == "experts":
                    each = 3 * size["moe_intermediate_size"] * self.hidden
                    total += count * (size["num_experts"] * self.hidden + size["num_experts_per_tok"] * each)
                if block.kind == "recurrence":
                    total += count * prod(size[name] for name in block.more["conv1d"])
        return total

    def adapted(self, target_modules: Sequence[str] | str) -> frozenset[str]:
        """Names of all maps with an adapter."""
        asked = self.kind.targets(target_modules)
        return frozenset(self.kind.linears if isinstance(asked, str) else asked)

    def lora_parameters(self, r: int, target_modules: Sequence[str] | str, dora: bool = False) -> int:
        """Adapters of rank r: r (in + out) for each target, and out magnitudes with DoRA."""
        names = self.adapted(target_modules)
        return sum(n * (r * (m.rows + m.columns) + dora * m.columns) for n, m in self.all_maps(names))

    def work(self, config: Config, words: int, abduction: int) -> Work:
        """Operations of a run's model on this base. words: C_w. abduction: entries of its matrices."""
        lora = config.model.lora
        adapters = self.lora_parameters(lora.r, lora.target_modules) if config.trains("lora") else 0
        blocks = [(count, block.kind) for count, layer in self.stack for block in layer]
        attending = sum(count for count, kind in blocks if kind == "attention")
        state = sum(count for count, kind in blocks if kind == "recurrence") * self.sizes.get("linear state", 0)
        return Work(
            matrices=self.active_entries,
            adapters=adapters,
            layers=attending,
            attention=self.heads * self.head_dim,
            abduction=abduction,
            words=words,
            vocab=self.vocab * config.learns_words,
            recurrent=state,
            softmax=config.word_terms["softmax_weight"] > 0,
        )


CHUNK = 64  # chunk size of gated linear attention, in tokens


def _named_sizes(size: Mapping[str, int]) -> dict[str, int]:
    """Sizes that follow from those in a config, by the names that linear maps use."""
    queries = size["num_attention_heads"] * size["head_dim"]
    found = {"one": 1, "two": 2, "hidden": size["hidden_size"], "intermediate": size.get("intermediate_size", 0)}
    found |= {"queries": queries, "gated queries": 2 * queries}
    found["keys"] = size["num_key_value_heads"] * size["head_dim"]
    found |= {"queries, keys, values": queries + 2 * found["keys"], "gate and up": 2 * found["intermediate"]}
    if "linear_num_value_heads" in size:
        heads, dk, dv = size["linear_num_value_heads"], size["linear_key_head_dim"], size["linear_value_head_dim"]
        keys, values = size["linear_num_key_heads"] * dk, heads * dv
        found |= {"linear values": values, "linear qkv": 2 * keys + values}
        found |= {"linear qkvz": 2 * keys + 2 * values, "linear ba": 2 * heads}
        # Products of a token: within its part of the text (k k, q k, the system of equations, its values), and with
        # the state (read for k and for q, written)
        found["linear state"] = heads * (CHUNK * (2 * dk + dk + 2 * dv) // 2 + 3 * dk * dv)
    return found


def _size(found: Mapping[str, Any], key: str, default: int) -> int:
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
    text = files("cqwen_dist.config.architectures").joinpath("public.yaml").read_text(encoding="utf-8")
    for model_type, table in yaml.safe_load(text).items():
        if row := table.get(name) or table.get(name.removesuffix("-Instruct")):
            more = row[-1] if isinstance(row[-1], dict) else {}
            return {"model_type": model_type, **sizes(*(value for value in row if value is not more), **more)}
    return None


def _rows_in_use(file: Path) -> int | None:
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
    return dict(text_part(found))
