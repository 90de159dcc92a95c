"""Makes the model (the seeds' `CausalQwenModel`, S2 section 5) from a config or a base."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.architectures.base_architecture import USUAL_TARGETS
from cqwen_dist.config.bases import rows_used, rows_with_number
from cqwen_dist.config.custom import find_custom, find_loaded
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.training import LoraConfig
from cqwen_dist.heads.abduction import ABDUCTIONS, abduction_named, make_abduction
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.beside import make_beside
from cqwen_dist.heads.precision import made_in_fp32
from cqwen_dist.model.backbone import FeatureExtractionNetwork
from cqwen_dist.model.base_loading import base_tokenizer, load_base
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.embedding import NumericalAwareEmbedding
from cqwen_dist.model.initialise import VALUE_SHARE, apply_preset, find_numeral_row, inherit_head
from cqwen_dist.model.lora import inject_lora
from cqwen_dist.model.modules import CausalModules, FeatureStack

W_NUM_SEED = 0
SHAPE = {*signature(CausalQwenConfig).parameters} - {"base", "num_token_id", "kwargs"}


def classes_of(config: CausalQwenConfig, loaded: str | None = None) -> tuple[Any, Any]:
    """The classes of abduction network and number head that a config names; None for a number head of the package's.

    loaded: the folder that the config comes from, whose code the user has to trust; None: the user's own run. Raises
    `UserError`.
    """
    key, name = "model.number_head", config.number_head
    if loaded is None:
        return abduction_named(config.abduction), find_custom(key, name) if name else None
    known, others = ABDUCTIONS.get(config.abduction), f"{', '.join(ABDUCTIONS)}; or "
    kind = known or find_loaded("model.abduction", config.abduction, loaded, others)
    return kind, find_loaded(key, name, loaded) if name else None


class CausalQwenModel(CausalModules):
    """The seeds' model."""

    def __init__(
        self,
        qwen_model_path: str | CausalQwenConfig,
        causal_hidden_size: int | None = None,
        *,
        base: PreTrainedModel | None = None,
        vocab_start: int = 0,
        rows: int | None = None,
        classes: Sequence[Any] | None = None,
    ) -> None:
        """qwen_model_path: a base model's folder or hub name (S2 5; the start is preset `seed`), with no further
        argument than causal_hidden_size; or a config. Then `base` gives the transformer, or a new one is built.
        vocab_start, rows: only this range of the vocabulary's rows. classes: from `classes_of`; a loaded folder has its
        own. Raises `UserError` for a base that does not load, and as `find_loaded`.
        """
        if isinstance(qwen_model_path, str):
            return self._of_base(qwen_model_path, causal_hidden_size)
        config = qwen_model_path
        if base is None:
            base = AutoModelForCausalLM.from_config(
                config.base_config, dtype=torch.get_default_dtype(), attn_implementation=config._attn_implementation
            )
        kind, number_head = classes or classes_of(config, config.name_or_path or "")
        transformer: Any = base.model
        table, transformer.embed_tokens = transformer.embed_tokens, None  # module 1 has the table
        size, hidden = config.causal_hidden_size, config.hidden_size
        with made_in_fp32():
            embedding = NumericalAwareEmbedding(table, hidden, config.num_token_id, config.digit_rows)
            features = FeatureStack(embedding, FeatureExtractionNetwork(transformer), config.depths)
            abduction = make_abduction(
                kind,
                config.abduction,
                hidden,
                size,
                scale_activation=config.scale_activation,
                scale_floor=config.scale_floor,
                **({"number_dims": config.number_dims} if config.beside else {}),
            )
            beside = make_beside(config)
            action = ActionNetwork(
                size,
                config.vocab_size,
                word_size=config.causal_size,
                vocab_start=vocab_start,
                rows=rows,
                scalar_threshold=config.scalar_threshold,
                config=config,
                number_head=number_head,
            )
        super().__init__(config, features, abduction, beside, action)
        if config.lora is not None:
            inject_lora(transformer, LoraConfig(**config.lora))

    def _of_base(self, name: str, causal_hidden_size: int | None) -> None:
        """The constructor for the name of a base model."""
        tokenizer = base_tokenizer(name)
        used = None if tokenizer is None else rows_used(tokenizer)
        rows_for = None if used is None else partial(rows_with_number, used=used, num_token_id=used)
        base = load_base(name, torch.float32, rows_for=rows_for)
        head = base.get_output_embeddings()
        config = CausalQwenConfig(base.config.to_dict(), used, causal_size=causal_hidden_size)
        CausalQwenModel.__init__(self, config, base=base)
        inherit_head(self, head.weight.detach(), head.bias)
        apply_preset(self, "seed")

    @classmethod
    def from_base_model(
        cls,
        base: PreTrainedModel,
        *,
        start: str,
        num_token_id: int,
        head: Any = None,
        table: Any = None,
        vocab_start: int = 0,
        rows: int | None = None,
        w_num_scale: float | None = 1.0,
        b_noise_init: float | None = None,
        num_row_init: str = "inherit",
        numerals: Sequence[int] = (),
        num_bias_init: float = 0.0,
        reg_gain: float = 1.0,
        line_ends: Sequence[int] = (),
        **shape: Any,
    ) -> CausalQwenModel:
        """A base model turned causal; its transformer moves in, so the base object is used up.

        start: "seed" or "seed-100", or "calibrated" (the seed's constants until `calibration.calibrate` is run).
        head, table: the output head's weight and the token table if `base` does not have them whole
        (`training.zero.partitioned_base`). num_row_init, num_bias_init: of <NUM>'s row, as `inherit_head`; "digits":
        at the input it is the mean row of `numerals`, at the output `calibration` fits it. w_num_scale: None gives
        w_num VALUE_SHARE of the mean norm of these rows, without them a factor of 0.2. reg_gain: of W_reg's Xavier
        start. line_ends: as `WidePart.begin`. shape: further fields of `CausalQwenConfig`. Raises `UserError`.
        """
        if unknown := [name for name in shape if name not in SHAPE]:
            allowed = f"an argument of from_base_model, or of the model's shape: {sorted(SHAPE)}"
            raise UserError(unknown[0], shape[unknown[0]], allowed)
        if lora := shape.get("lora"):
            kind = architecture(base.config.model_type)
            targets = lora.get("target_modules", USUAL_TARGETS)
            shape["lora"] = {**lora, "target_modules": kind.targets(targets)}
        config = CausalQwenConfig(base.config.to_dict(), num_token_id, **shape)
        if not 0 <= num_token_id < config.vocab_size:
            raise UserError("model.num_token_id", num_token_id, f"a row of the {config.vocab_size} of the vocabulary")
        output = base.get_output_embeddings()
        weight, bias = (output.weight.detach(), output.bias) if head is None else (head, None)
        table = base.get_input_embeddings().weight if table is None else table
        whole = 0.2 if w_num_scale is None else w_num_scale
        model = cls(config, base=base, vocab_start=vocab_start, rows=rows, classes=classes_of(config))
        embedding = model.features.embedding
        # The same for every seed of a run: z depends on it, and the runs of a job share z
        w_num = embedding.w_num.data.normal_(generator=torch.Generator().manual_seed(W_NUM_SEED))
        w_num.mul_(whole * config.hidden_size**-0.5)
        if numerals:
            norm = find_numeral_row(embedding, table, numerals)
            if config.digit_rows:
                embedding.numeral_row.zero_()  # <NUM> already has a digit's row
            if num_row_init == "digits":
                embedding.num_row.data.copy_(embedding.numeral_row)
                w_num.mul_(VALUE_SHARE / whole * norm if w_num_scale is None else 1.0)
        inherit_head(model, weight, bias, num_row_init=num_row_init, num_bias_init=num_bias_init, reg_gain=reg_gain)
        apply_preset(model, start, b_noise_init)
        if model.beside is not None:
            model.beside.begin(line_ends)
        return model
