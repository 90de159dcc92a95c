"""The config of a CausalQwen, `config.json` in the weights' folder."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from numbers import Real
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from cqwen_dist.config.architectures.base_architecture import USUAL
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.shape import CHARACTERS, NONE
from cqwen_dist.heads.beside import BESIDE_Z
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.ovr.head import TermOptions

OF_BASE = ("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
EXPORT_FORMAT = 2  # of config.json and the weights; increase it when either changes its meaning


class CausalQwenConfig(PretrainedConfig):
    """The shape of a CausalQwen and the constants that inference needs.

    base: the base model's own config, as a dict, and `added_rows` in it, if any. num_token_id: the row used for
    <NUM>. used_rows: words from here on are spare and never written (default num_token_id + 1). causal_size: C without
    the number dimensions (default H). number_dims: m. wide, random_features, depths: as in a run's section
    `model`; wide needs number dimensions. abduction: a name of `ABDUCTIONS`. scalar_threshold: one C for all words.
    target: the regression's unit (`TargetTransform.to_dict`). number_head: a class of your own; candidates: exact
    numbers (`model.candidates`).
    lora: adapters present in the backbone (`LoraConfig` as a dict), or None. calibration: of the intervals, on held-out
    numbers (`Intervals.to_dict`), or None. word_terms: fields of `TermOptions` with which labels are learnt.
    learns_words: False for a model that learnt numbers only: it answers each prompt with one number.
    constants, symbols: for computed candidates, the commonest numbers of the data, and the tokens that are signs
    (`config.bases.symbols_of`). digit_rows: the tokens of `CHARACTERS` if digits are kept in view, else none.

    Raises `UserError` for a value that no model has, as an edited config.json may contain.
    """

    model_type = "causal_qwen"
    keys_to_ignore_at_inference = ["cache", "hidden_states", "loc_U", "scale_U"]  # noqa: RUF012  Trainer's

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        num_token_id: int | None = None,
        causal_size: int | None = None,
        number_dims: int = 0,
        abduction: str = "linear",
        scale_activation: str = "softplus",
        scale_floor: float = 1e-6,
        scalar_threshold: bool = False,
        target: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        used_rows: int | None = None,
        calibration: dict[str, Any] | None = None,
        wide: int = 0,
        random_features: int = 0,
        depths: int = 0,
        word_terms: dict[str, float] | None = None,
        learns_words: bool = True,
        constants: Sequence[float] = (),
        symbols: dict[str, list[int]] | None = None,
        digit_rows: Sequence[int] = (),
        number_head: str | None = None,
        candidates: str = NONE,
        **kwargs: Any,
    ) -> None:
        base_config = AutoConfig.for_model(**(base or {"model_type": USUAL}))
        self.base = json.loads(base_config.to_json_string(use_diff=False))  # as it will read from a file
        self.base.pop("_name_or_path", None)  # a path of the machine that it was trained on
        self.vocab_size = base_config.vocab_size
        self.hidden_size = base_config.hidden_size
        for name in OF_BASE:  # libraries look for them here
            setattr(self, name, getattr(base_config, name, None))
        self.num_token_id = self.vocab_size - 1 if num_token_id is None else num_token_id
        self.used_rows = self.num_token_id + 1 if used_rows is None else used_rows
        self.causal_size = causal_size or self.hidden_size
        self.number_dims = number_dims
        self.abduction = abduction
        self.scale_activation = scale_activation
        self.scale_floor = scale_floor
        self.scalar_threshold = scalar_threshold
        self.target = target or asdict(TargetTransform())
        self.lora = lora
        self.calibration = calibration
        self.number_head, self.candidates = number_head, candidates
        self.wide, self.random_features, self.depths = wide, random_features, depths
        self.word_terms, self.learns_words = word_terms or {}, learns_words
        self.constants, self.symbols = list(constants), symbols or {}
        self.digit_rows = list(digit_rows)
        self._check(base_config.vocab_size)
        kwargs.setdefault("tie_word_embeddings", False)
        self.use_cache = kwargs.pop("use_cache", True)
        kwargs.pop("causal_qwen_format", None)
        self.causal_qwen_format = EXPORT_FORMAT
        for name in TOKENS:
            setattr(self, name, kwargs.pop(name, getattr(base_config, name, None)))
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers' own. Raises `UserError` for a config.json in another format."""
        if (found := config_dict.get("causal_qwen_format")) != EXPORT_FORMAT:
            allowed = f"{EXPORT_FORMAT}, which this version reads (export the run again)"
            raise UserError("causal_qwen_format", found, allowed, f"{kwargs.get('name_or_path', '')}/config.json")
        return super().from_dict(config_dict, **kwargs)

    def _check(self, rows: int) -> None:
        """Refuse values with which a model would be built, and fail later or write nonsense. rows: the vocabulary's."""
        terms = self.word_terms
        of_terms = isinstance(terms, dict) and terms.keys() <= {*TermOptions._fields}
        of_terms = of_terms and all(value == 0 or _above_0(value) for value in terms.values())
        digits, count = self.digit_rows, len(CHARACTERS)
        rows_of_digits = not digits or (len(digits) == count and all(row in range(rows) for row in digits))
        for name, found, fits, allowed in (
            ("num_token_id", self.num_token_id, self.num_token_id in range(rows), f"a row below {rows}"),
            ("used_rows", self.used_rows, self.used_rows in range(1, rows + 1), f"1 to {rows}"),
            ("scale_activation", self.scale_activation, self.scale_activation in ("softplus", "exp"), "softplus, exp"),
            ("scale_floor", self.scale_floor, _above_0(self.scale_floor), "a number above 0"),
            ("depths", self.depths, self.depths == 0 or self.depths * self.wide > 0, "0, or above 0 with wide"),
            ("wide", self.wide, not self.wide or self.number_dims > 0, "0 without number_dims, through which it acts"),
            ("word_terms", terms, of_terms, "numbers of at least 0 by name of a term's option"),
            ("digit_rows", digits, rows_of_digits, f"no rows, or {count} below {rows}"),
        ):
            if not fits:
                raise UserError(f"config.json: {name}", found, allowed)
        try:
            TargetTransform(**self.target)
        except (TypeError, ValueError) as error:
            raise UserError("config.json: target", self.target, f"a target's unit ({error})") from None

    def to_dict(self) -> dict[str, Any]:
        """PEFT asks for this before it looks up the model type's targets, so they are declared here: the base's."""
        for name, targets in vars(sys.modules.get("peft.utils.constants", object)).items():
            if name.endswith("_MODULES_MAPPING") and USUAL in targets:
                targets.setdefault(self.model_type, targets[USUAL])
        return dict(super().to_dict())

    @property
    def custom_pipelines(self) -> dict[str, Any]:
        """transformers' `pipeline` reads this for a folder's own code; `cqwen_dist.auto` registers the package's."""
        if __name__.startswith("cqwen_dist."):
            return {}
        impl = "modeling_causal_qwen.CausalQwenTextGeneration"
        return {"text-generation": {"impl": impl, "pt": ["AutoModelForCausalLM"]}}

    @property
    def added_rows(self) -> int:
        """Number of rows added to the base's own, as it had none to spare for <NUM>."""
        return int(self.base.get("added_rows", 0))

    @property
    def added_from(self) -> int | None:
        """The first added row that no mode writes; None if no row was added."""
        return int(self.used_rows) if self.added_rows else None

    @property
    def base_config(self) -> PretrainedConfig:
        """The base model's config object."""
        return AutoConfig.for_model(**self.base)

    @property
    def beside(self) -> bool:
        """True if there is a side network (`heads.beside`)."""
        return self.wide > 0

    @property
    def feature_size(self) -> int:
        """Width of z: that of `FeatureStack`, plus 3 columns if there is a side network."""
        return int(self.stack_size + (BESIDE_Z if self.beside else 0))

    @property
    def stack_size(self) -> int:
        """Width of `FeatureStack`: H, or with depths as many states, z among them, and their means."""
        return int(self.hidden_size * max(2 * self.depths, 1))

    @property
    def causal_hidden_size(self) -> int:
        """C: word part plus number dimensions."""
        return int(self.causal_size + self.number_dims)


def _above_0(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf
