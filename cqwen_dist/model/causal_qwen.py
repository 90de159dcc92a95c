"""The model: features, abduction, action; and its Hugging Face face.

    input_ids, numeric_values --FeatureStack--> z [B,T,H] --AbductionNetwork--> U [B,T,C]
                                                          --ActionNetwork--> S [B,T,V] and Y [B,T]

`CausalQwenModel` is the seeds' module (S2 section 5). `CausalQwenForCausalLM` is what users load and generate with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.config import LoraConfig, UserError
from cqwen_dist.config.bases import numeral_ids, rows_with_number
from cqwen_dist.generate.generator import Watch, at_hand, generate
from cqwen_dist.generate.hugging_face import CausalQwenGeneration, translate
from cqwen_dist.model import calibration, initialise
from cqwen_dist.model.abduction import ABDUCTIONS, AbductionNetwork
from cqwen_dist.model.action import ActionNetwork
from cqwen_dist.model.backbone import FeatureExtractionNetwork, load_base
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.embedding import NumericalAwareEmbedding
from cqwen_dist.model.lora import inject_lora, merge_lora
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import linear_ovr, ovr_prob_at
from cqwen_dist.ops.regression import cauchy_nll
from cqwen_dist.targets import TargetTransform


class FeatureStack(nn.Module):
    """Modules 1 and 2: ids and values to features. What DeepSpeed holds in training; the heads stay outside."""

    def __init__(self, embedding: NumericalAwareEmbedding, backbone: FeatureExtractionNetwork) -> None:
        super().__init__()
        self.embedding = embedding
        self.backbone = backbone

    def forward(
        self,
        input_ids: Tensor,
        numeric_values: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """[B,T] each -> z [B,T,H]; with keep [N] (indices into the flattened B*T) only those, [N,H]."""
        embeddings = self.embedding(input_ids, numeric_values)
        z = self.backbone(embeddings, attention_mask, position_ids=position_ids, past_key_values=past_key_values)
        return z if keep is None else z.flatten(0, 1).index_select(0, keep)


def take_transformer(base: PreTrainedModel) -> tuple[PreTrainedModel, nn.Embedding]:
    """A causal base's transformer and its token table, the table taken out (it moves to module 1)."""
    transformer = base.model
    table = transformer.embed_tokens
    transformer.embed_tokens = None
    return transformer, table


class CausalQwenModel(nn.Module):
    """The seeds' model: (input_ids, numeric_values) -> (loc_S, scale_S, loc_Y, scale_Y)."""

    def __init__(
        self,
        source: str | CausalQwenConfig,
        causal_hidden_size: int | None = None,
        *,
        base: PreTrainedModel | None = None,
        vocab_start: int = 0,
        rows: int | None = None,
        w_num_scale: float = 1.0,
    ) -> None:
        """source: a base model's folder or hub name (the seeds' `qwen_model_path`; starts as preset `seed`), or a
        config: then `base` gives the transformer, or it is built empty. vocab_start, rows: hold only this range of
        the vocabulary's rows. w_num_scale: factor on w_num's start.
        """
        super().__init__()
        head = None
        if isinstance(source, str):
            used = tokenizer_rows(source)
            base = load_base(source, torch.float32, rows_for=_with_number(used, used))
            head = base.get_output_embeddings()
            config = CausalQwenConfig(base.config.to_dict(), used, causal_size=causal_hidden_size)
        else:
            config = source
        if base is None:
            base = AutoModelForCausalLM.from_config(
                config.base_config, dtype=torch.get_default_dtype(), attn_implementation=config._attn_implementation
            )
        self.config = config
        transformer, table = take_transformer(base)
        size, hidden = config.causal_hidden_size, config.hidden_size
        self.features = FeatureStack(
            NumericalAwareEmbedding(table, hidden, config.num_token_id, w_num_scale),
            FeatureExtractionNetwork(transformer),
        )
        self.abduction = ABDUCTIONS[config.abduction](
            hidden, size, scale_activation=config.scale_activation, scale_floor=config.scale_floor
        )
        self.action = ActionNetwork(
            size,
            config.vocab_size,
            word_size=config.causal_size,
            vocab_start=vocab_start,
            rows=rows,
            scalar_threshold=config.scalar_threshold,
        )
        if config.lora is not None:
            inject_lora(transformer, LoraConfig(**config.lora))
        if head is not None:
            initialise.inherit_head(self, head.weight.detach(), head.bias)
            initialise.apply_preset(self, "seed")

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
        **shape: Any,
    ) -> CausalQwenModel:
        """A base model turned causal; the base object is used up (its transformer moves in).

        start: "seed" or "seed-100", or "calibrated" (the seed's constants until `calibration.calibrate` is run).
        head, table: the output head's weight and the token table where `base` does not hold them whole
        (`train.zero.load`). num_row_init, num_bias_init: of <NUM>'s row; "digits": at the input it is the mean of
        those of `numerals`, at the output what `calibration` fits. w_num_scale: None: w_num begins with VALUE_SHARE of
        their mean norm. reg_gain: of W_reg's Xavier start. shape: further fields of `CausalQwenConfig`.
        """
        config = CausalQwenConfig(base.config.to_dict(), num_token_id, **shape)
        if not 0 <= num_token_id < config.vocab_size:
            raise UserError("model.num_token_id", num_token_id, f"a row of the {config.vocab_size} of the vocabulary")
        weight, bias = head, None
        if head is None:
            output = base.get_output_embeddings()
            weight, bias = output.weight.detach(), output.bias
        if table is None:
            table = base.get_input_embeddings().weight
        whole = 1.0 if w_num_scale is None else w_num_scale
        model = cls(config, base=base, vocab_start=vocab_start, rows=rows, w_num_scale=whole)
        if num_row_init == "digits" and numerals:
            norm = initialise.inherit_numeral_row(model, table, numerals)
            if w_num_scale is None:
                model.features.embedding.w_num.data.mul_(initialise.VALUE_SHARE * norm)
        initialise.inherit_head(
            model, weight, bias, num_row_init=num_row_init, num_bias_init=num_bias_init, reg_gain=reg_gain
        )
        initialise.apply_preset(model, start, b_noise_init)
        return model

    @property
    def transformer(self) -> nn.Module:
        """The base's transformer, with its adapters."""
        return self.features.backbone.transformer

    @property
    def target(self) -> TargetTransform:
        """The unit of Y."""
        return TargetTransform.from_dict(self.config.target)

    def kept_features(self, batch: Batch, keep: Tensor) -> Tensor:
        """z [N,H] of a training batch's kept positions [N].

        No attention mask: positions that restart keep packed documents apart (see `data.collate`), and right
        padding is never attended to.
        """
        return self.features(batch.input_ids, batch.numeric_values, None, batch.position_ids, keep=keep)

    def infer(
        self,
        input_ids: Tensor,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **context: Any,
    ) -> Cauchy:
        """U of every position [B,T,C]. context: position_ids, past_key_values, keep."""
        if numeric_values is None:
            numeric_values = torch.zeros(input_ids.shape, dtype=torch.float64, device=input_ids.device)
        features = self.features(input_ids, numeric_values, attention_mask, **context)
        with at_hand(self.abduction):
            return self.abduction(features)

    def forward(
        self, input_ids: Tensor, numeric_values: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B,T] each -> loc_S, scale_S [B,T,V], loc_Y, scale_Y [B,T] (S2 section 5), all fp32.

        Y is in the target's unit. Materialises [B,T,V]; training never comes here.
        """
        u = self.infer(input_ids, numeric_values, attention_mask)
        return self.action(u.loc, u.scale)


@dataclass
class CausalQwenOutput(ModelOutput):
    """What a forward pass gives, in fp32; Y is in the target's unit (`CausalQwenConfig.target`).

    loss: scalar, where labels are given: the mean OvR loss of the words plus the gated mean NLL of the numbers.
    logits: loc_S [B,k,V] of the last k = logits_to_keep positions, on demand; scale_S likewise, with output_scales.
    loc_U, scale_U [B,T,C]: the individual. loc_Y, scale_Y [B,T]: the number, were there one next.
    past_key_values: the cache that was given, extended.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    scale_S: Tensor | None = None
    loc_U: Tensor | None = None
    scale_U: Tensor | None = None
    loc_Y: Tensor | None = None
    scale_Y: Tensor | None = None
    past_key_values: Any = None


class CausalQwenForCausalLM(PreTrainedModel, GenerationMixin):
    """CausalQwen as Hugging Face users know models: from_pretrained, save_pretrained, generate."""

    config_class = CausalQwenConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = [  # noqa: RUF012  what accelerate keeps on one device
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "NumericalAwareEmbedding",
        "AbductionNetwork",
        "ActionNetwork",
    ]
    _keep_in_fp32_modules_strict = {"abduction", "action", "w_num", "num_row"}  # noqa: RUF012  transformers' name

    def __init__(self, config: CausalQwenConfig, model: CausalQwenModel | None = None) -> None:
        super().__init__(config)
        self.model = CausalQwenModel(config) if model is None else model
        if model is None:
            self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """transformers asks this for what a checkpoint did not hold; ours start as their constructors say."""
        if isinstance(module, AbductionNetwork):
            module.reset(1.3133)
        elif isinstance(module, ActionNetwork):
            module.reset()
        else:
            super()._init_weights(module)

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's: what a saved config states. The heads are fp32 whatever it is."""
        return next(self.model.transformer.parameters()).dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.model.features.embedding.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.features.embedding.token_embedding = value

    @classmethod
    def from_base(
        cls,
        name_or_path: str,
        start: str = "seed",
        num_token_id: int | None = None,
        calibration_batches: Iterable[Batch] | None = None,
        **options: Any,
    ) -> CausalQwenForCausalLM:
        """A base model turned causal (seed S3 section 4).

        start: "seed", "seed-100", or "calibrated" (then calibration_batches are needed). num_token_id: default
        len(tokenizer) of the tokenizer beside the model, or the last row where there is none. options: of
        `CausalQwenModel.from_base_model` (causal_size, number_dims, ...). Calibrated, <NUM>'s rows inherit from the
        digits' unless num_row_init says otherwise. Raises `UserError`.
        """
        used = tokenizer_rows(name_or_path)
        if start == "calibrated" and options.setdefault("num_row_init", "digits") == "digits":
            found = tokenizer_beside(name_or_path)
            options.setdefault("numerals", [] if found is None else numeral_ids(found.get_vocab()))
            options.setdefault("w_num_scale", None if options["numerals"] else 0.2)
        rows_for = _with_number(used, used if num_token_id is None else num_token_id)
        base = load_base(name_or_path, options.pop("dtype", torch.float32), rows_for=rows_for)
        if num_token_id is None:
            num_token_id = base.config.vocab_size - 1 if used is None else used
        options.setdefault("used_rows", base.config.vocab_size if used is None else max(used, num_token_id + 1))
        model = CausalQwenModel.from_base_model(base, start=start, num_token_id=num_token_id, **options)
        if start == "calibrated":
            if calibration_batches is None:
                raise UserError("calibration_batches", "no batches", "batches of text for the calibrated start")
            calibration.calibrate(model, calibration_batches, numerals=options.get("numerals", ()))
        causal = cls(model.config, model)
        if base.generation_config is not None:
            causal.generation_config = base.generation_config
        return causal

    def forward(
        self,
        input_ids: Tensor,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        logits_to_keep: int | None = None,
        output_scales: bool = False,
    ) -> CausalQwenOutput:
        """[B,T] each -> `CausalQwenOutput`.

        labels [B,T]: as Hugging Face's, not shifted (position t learns labels[t+1] and, where that is <NUM>, its
        numeric_values), -100 ignored. logits_to_keep: loc_S of the last so many positions (default: none).
        """
        u = self.model.infer(
            input_ids,
            numeric_values,
            attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
        )
        action, logits, scale_s, loss = self.model.action, None, None, None
        with at_hand(action):
            u_prime = action.add_noise(u)
            y = action.value(u_prime)
            if logits_to_keep:
                kept = Cauchy(u_prime.loc[:, -logits_to_keep:], u_prime.scale[:, -logits_to_keep:])
                scores = action.scores(kept) if output_scales else None
                seen = action.word_part(kept).loc
                logits = seen @ action.cls_weight.T + action.cls_bias if scores is None else scores.loc
                scale_s = None if scores is None else scores.scale
            if labels is not None:
                loss = self._loss(u_prime, y, labels, numeric_values)
        return CausalQwenOutput(
            loss=loss,
            logits=logits,
            scale_S=scale_s,
            loc_U=u.loc,
            scale_U=u.scale,
            loc_Y=y.loc,
            scale_Y=y.scale,
            past_key_values=past_key_values,
        )

    def _loss(self, u_prime: Cauchy, y: Cauchy, labels: Tensor, values: Tensor | None) -> Tensor:
        """S0 5.3 with alpha 0, the gate without gradient, lambda 1; never [B,T,V]."""
        action, num = self.model.action, self.config.num_token_id
        labels = labels[:, 1:].flatten()
        valid = (labels != IGNORE_INDEX).nonzero()[:, 0]
        labels = labels[valid]
        seen = action.word_part(Cauchy(*(t[:, :-1].flatten(0, 1)[valid] for t in u_prime)))
        head = (action.cls_weight, action.cls_bias, action.threshold)
        loss = linear_ovr(seen.loc, seen.scale, *head, labels).loss / max(labels.numel(), 1)
        at = (labels == num).nonzero()[:, 0]
        loc, scale = (t[:, :-1].flatten()[valid][at] for t in y)
        goals = loc.new_zeros(at.shape, dtype=torch.float64) if values is None else values[:, 1:].flatten()[valid][at]
        with torch.no_grad():
            gate = ovr_prob_at(seen.loc[at], seen.scale[at], *head, labels.new_tensor([num]))[:, 0]
        nll = cauchy_nll(loc, scale, self.model.target.forward(goals))
        return loss + (gate * nll).sum() / max(at.numel(), 1)

    @torch.no_grad()
    def generate(  # type: ignore[override]  # numbers go with the ids
        self,
        input_ids: Tensor | None = None,
        numeric_values: Tensor | None = None,
        mode: str | None = None,
        return_numbers: bool = False,
        *,
        inputs: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        watch: Sequence[Watch] = (),
        **options: Any,
    ) -> Any:
        """Continue prompts: prompt + continuation [B,T'] int64; with return_numbers also their `GeneratedNumbers`.

        mode: a name of `generate.modes.MODES`, default standard. The rest is Hugging Face's `generate`, as far as it
        has a meaning here (`generate.hugging_face.translate`): a GenerationConfig or its fields as options, streamers,
        stopping criteria, stop_strings (with the tokenizer); processors of logits in mode compatible. Further options
        are `generate.generator.generate`'s: decode_rule, seed, generator, eps_truncation, used_rows, watch. Raises
        `UserError`.
        """
        ids = inputs if input_ids is None else input_ids
        if ids is None:
            raise UserError("prompt", None, "token ids [B,T], int64")
        request = translate(
            self,
            ids,
            attention_mask,
            mode,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            tokenizer=tokenizer,
            given=options,
        )
        given = {**request.options, "watch": [*request.options["watch"], *watch]}
        if request.copies > 1:
            ids = ids.repeat_interleave(request.copies, 0)
            numeric_values = None if numeric_values is None else numeric_values.repeat_interleave(request.copies, 0)
            if attention_mask is not None:
                given["attention_mask"] = attention_mask.repeat_interleave(request.copies, 0)
        written, numbers = generate(self.model, ids, numeric_values, mode=request.mode, **given)
        if streamer is not None:
            streamer.end()
        if request.as_output:
            return CausalQwenGeneration(sequences=written, numbers=numbers)
        return (written, numbers) if return_numbers else written

    def merge_adapters(self) -> None:
        """Fold LoRA into the backbone, in place."""
        merge_lora(self.model.transformer)
        self.config.lora = None
        self.model.config.lora = None


def tokenizer_rows(name_or_path: str) -> int | None:
    """Rows that the tokenizer beside a model uses, as `data.tokenizer` counts them; None where there is none."""
    tokenizer = tokenizer_beside(name_or_path)
    return None if tokenizer is None else max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_beside(name_or_path: str) -> Any:
    """transformers' tokenizer beside a model, or None where there is none."""
    folder = Path(name_or_path).expanduser()
    # of a folder without these, transformers makes up an empty tokenizer
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name_or_path)
    except (OSError, ValueError, KeyError):
        return None
    return getattr(tokenizer, "tokenizer", tokenizer)  # of `cqwen_dist.auto`'s own class


def _with_number(used: int | None, num_token_id: int | None) -> Callable[[int], int] | None:
    """`load_base`'s rows_for, of a tokenizer that uses so many rows; None where there is no tokenizer."""
    if used is None or num_token_id is None:
        return None
    return lambda rows: rows_with_number(rows, used, num_token_id)


def register() -> None:
    """Make AutoConfig, AutoModel and AutoModelForCausalLM know `causal_qwen`."""
    AutoConfig.register(CausalQwenConfig.model_type, CausalQwenConfig, exist_ok=True)
    AutoModel.register(CausalQwenConfig, CausalQwenForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(CausalQwenConfig, CausalQwenForCausalLM, exist_ok=True)


__all__ = [
    "CausalQwenConfig",
    "CausalQwenForCausalLM",
    "CausalQwenModel",
    "CausalQwenOutput",
    "FeatureStack",
    "register",
]
