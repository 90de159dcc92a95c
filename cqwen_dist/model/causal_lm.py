"""The model as a Hugging Face model: users load, save and generate with it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.generation_settings import Prompt
from cqwen_dist.generate.generator import Watch, generate
from cqwen_dist.generate.hugging_face import translate, with_numbers
from cqwen_dist.generate.modes import ModeName
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.beside import BESIDE
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.precision import at_hand, refuse_changed
from cqwen_dist.model.backbone import seen_inside
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.labels_loss import loss_of_labels, refuse_foreign
from cqwen_dist.model.lora import merge_lora, refuse_rounded
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.wings import from_wing


@dataclass
class CausalQwenOutput(ModelOutput):
    """The outputs of a forward pass, in fp32; Y is in the target's unit (`CausalQwenConfig.target`).

    loss: scalar, if labels are given: the mean OvR loss of the words plus the gated mean NLL of the numbers.
    logits: loc_S [B,k,V] of the positions that logits_to_keep names; with labels only if it is given.
    scale_S, log_probs: on demand, of the same positions: S's scale, and log P(S_k > C_k), one word against the rest.
    loc_U, scale_U [B,T,C]: the individual. loc_Y, scale_Y [B,T]: the law of the number, if one comes next.
    cache: that was given or asked for, extended; as past_key_values too, as transformers called it before 5.24.
    hidden_states, attentions: on demand, as `seen_inside`, in the backbone's dtype; attentions only with
    attn_implementation "eager" (others keep none).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    scale_S: Tensor | None = None
    loc_U: Tensor | None = None
    scale_U: Tensor | None = None
    loc_Y: Tensor | None = None
    scale_Y: Tensor | None = None
    cache: Any = None
    log_probs: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> Any:
        return self.cache


class CausalQwenForCausalLM(PreTrainedModel, GenerationMixin):
    """CausalQwen as Hugging Face users know models: from_pretrained, save_pretrained, generate."""

    config_class = CausalQwenConfig
    accepts_loss_kwargs = True  # Trainer gives num_items_in_batch
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True  # as the base does
    _can_compile_fullgraph = True  # without labels
    _no_split_modules = [  # noqa: RUF012  what accelerate keeps on one device, beside the base's layers
        "NumericalAwareEmbedding",
        "AbductionNetwork",
        "ActionNetwork",
    ]
    _keep_in_fp32_modules_strict = {"abduction", "action", BESIDE, "w_num", "num_row"}  # noqa: RUF012  transformers' name
    # Of each quantiser in transformers: modules that it leaves unchanged. A name counts from the model's start on.
    _keep_in_fp32_modules = {"model.abduction", "model.action", f"model.{BESIDE}"}  # noqa: RUF012

    def __init__(self, config: CausalQwenConfig, model: CausalQwenModel | None = None) -> None:
        super().__init__(config)
        self.model = CausalQwenModel(config) if model is None else model
        transformer: Any = self.model.transformer
        self._no_split_modules = [*self._no_split_modules, *transformer._no_split_modules]
        for name in ("_supports_flex_attn", "_supports_attention_backend", "_can_compile_fullgraph"):
            setattr(self, name, getattr(transformer, name, False))
        if self.model.beside is None:
            self._keep_in_fp32_modules_strict = self._keep_in_fp32_modules_strict - {BESIDE}
            self._keep_in_fp32_modules = self._keep_in_fp32_modules - {f"model.{BESIDE}"}
        if model is None:
            self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """transformers calls this for modules that a checkpoint lacks; ours start as in their constructors."""
        if isinstance(module, (AbductionNetwork, ActionNetwork)):
            # Some of its versions also call it for modules that have been loaded
            if not all(getattr(part, "_is_hf_initialized", False) for part in module.parameters()):
                module.reset()
        else:  # the base's own class knows its parts, such as factors that no file has
            transformer: Any = self.model.transformer
            transformer._init_weights(module)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the backbone's first weight that is not quantised; a saved config states it."""
        return next(p.dtype for p in self.model.transformer.parameters() if p.is_floating_point())

    def get_input_embeddings(self) -> nn.Module:
        return self.model.features.embedding.token_embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.features.embedding.take_table(value)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **given: Any) -> Any:
        """The table, at its present size. Raises `UserError` for any other size: each row has a threshold too."""
        if new_num_tokens not in (None, self.config.vocab_size):
            allowed = f"{self.config.vocab_size}, the rows of the vocabulary, spare ones included"
            raise UserError("resize_token_embeddings", new_num_tokens, allowed)
        return self.get_input_embeddings()

    @classmethod
    def from_base(
        cls,
        name_or_path: str,
        num_token_id: int | None = None,
        calibration_batches: Iterable[Batch] = (),
        texts: Iterable[str] | None = None,
        **options: Any,
    ) -> "CausalQwenForCausalLM":
        """A base model turned causal (seed S3 section 4).

        texts: some of the training texts, in random order. With them (or calibration_batches) the model starts
        calibrated, as a run does: about 4,000 tokens are read, by the base's own tokenizer, and their numbers give the
        unit. Without them it starts at the seeds' constants, with a warning: the first loss is then in the hundreds or
        thousands. num_token_id: default len(tokenizer) of the model's tokenizer, or the last row without one. options:
        of `CausalQwenModel.from_base_model` (causal_size, number_dims, ...), the base's dtype (float32) and device (the
        CPU), for calibration, and keep_digits, for texts (`data.keep_digits`; the tokenizer's policy has to say so
        too). The calibrated start makes <NUM>'s rows from the digits' unless num_row_init is given. Raises `UserError`.
        """
        found = import_module("cqwen_dist.model.from_base")  # by name: a loaded model needs no texts and no calibration
        model, base = found.turned_causal(name_or_path, num_token_id, calibration_batches, texts, **options)
        causal = cls(model.config, model).eval()  # as from_pretrained leaves a model
        causal.generation_config = base.generation_config or causal.generation_config
        return causal

    def forward(
        self,
        input_ids: Tensor | None = None,
        numeric_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        output_scales: bool = False,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_log_probs: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        return_dict: bool | None = None,
        cache: Any = None,
        num_items_in_batch: Tensor | int | None = None,
        **foreign: Any,
    ) -> CausalQwenOutput | tuple[Any, ...]:
        """[B,T] each -> `CausalQwenOutput`, or with return_dict False a tuple of its values that are not None.

        labels [B,T]: as Hugging Face's, not shifted (position t learns labels[t+1] and, if that is <NUM>, its
        numeric_values). -100 is ignored, and so is padding by the attention_mask [B,T], as input and as label, on
        either side (S0 5.3). logits_to_keep: the positions that have logits: 0 all, k the last k, or indices [k];
        default all without labels, none with them, as training needs no [B,T,V]. output_scales, output_log_probs:
        further outputs of these positions. inputs_embeds [B,T,H]: instead of ids; phi(v) w_num is added to it.
        use_cache: begin a cache if none is given. cache: an alias of past_key_values. num_items_in_batch: as
        `loss_of_labels`. Raises `UserError`.
        """
        refuse_foreign(foreign)
        self._check(input_ids, numeric_values, inputs_embeds)
        cache = self._cache_of(past_key_values if cache is None else cache, use_cache)
        asked = self._asked(output_hidden_states=output_hidden_states, output_attentions=output_attentions)
        with seen_inside(self.model.transformer, **asked) as seen:
            u = self.model.infer(
                input_ids,
                numeric_values,
                attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
            )
        action = self.model.action
        with at_hand(action), torch.autocast(u.loc.device.type, enabled=False):
            u_prime = action.add_noise(u)
            y = action.number_head.value(u_prime)
            scored = labels is None or logits_to_keep is not None or output_scales or output_log_probs
            scores: Any = self._scores(u_prime, logits_to_keep, output_scales, output_log_probs) if scored else {}
            given = input_ids, numeric_values, attention_mask, num_items_in_batch
            loss = None if labels is None else loss_of_labels(self, u, labels, *given)
        laws: Any = {"loc_U": u.loc, "scale_U": u.scale, "loc_Y": y.loc, "scale_Y": y.scale}
        output = CausalQwenOutput(loss=loss, cache=cache, **scores, **laws, **seen)
        return self._answer(output, return_dict)

    def _check(self, ids: Tensor | None, values: Tensor | None, embeds: Tensor | None = None) -> None:
        """Refuse inputs that do not fit together, <NUM> in the ids without a value, and heads that somebody has changed
        past what they compute with. Raises `UserError`."""
        if self.dtype == torch.float64:
            raise UserError("dtype", "torch.float64", "float32, bfloat16 or float16; the heads compute in float32")
        if not torch.compiler.is_compiling():
            refuse_changed(self.model.heads)
        if (ids is None) == (embeds is None):
            raise UserError("input_ids", "none" if ids is None else "inputs_embeds too", "one of the two")
        given: Any = embeds if ids is None else ids
        if values is not None and values.shape != given.shape[:2]:
            allowed = f"{list(given.shape[:2])}, one for each token (prompt tuning adds tokens without values)"
            raise UserError("numeric_values", list(values.shape), allowed)
        if values is not None or ids is None or torch.compiler.is_compiling():
            return
        if bool((ids == self.config.num_token_id).any()):
            allowed = "the value of each <NUM> in input_ids: pass all that the tokenizer returns (in a pipeline: "
            allowed += "make it by transformers.pipeline), or load the tokenizer with read_numbers=False"
            raise UserError("numeric_values", None, allowed)

    def _asked(self, **outputs: Any) -> dict[str, Any]:
        """The backbone's outputs that are wanted, by the call or else by the config."""
        wanted = {n: getattr(self.config, n) if value is None else value for n, value in outputs.items()}
        return {name: value for name, value in wanted.items() if value}

    def _cache_of(self, given: Any, use_cache: bool | None) -> Any:
        return DynamicCache(config=self.config.base_config) if use_cache and given is None else given

    def _answer(self, output: Any, return_dict: bool | None) -> Any:
        """An output, or by the call or else by the config a tuple of it."""
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _scores(self, u_prime: Cauchy, keep: int | Tensor | None, scales: bool, log_probs: bool) -> dict[str, Tensor]:
        """loc_S and, on demand, scale_S and log_probs, [B,k,V] each, of the positions that logits_to_keep names."""
        action, at = self.model.action, slice(-keep, None) if isinstance(keep, int) else keep
        kept = u_prime if at is None else Cauchy(u_prime.loc[:, at], u_prime.scale[:, at])
        if not scales and not log_probs:
            return {"logits": action.word_part(kept).loc @ action.cls_weight.T + action.cls_bias}
        found = action.scores(kept)
        further = {"scale_S": found.scale} if scales else {}
        if log_probs:
            further["log_probs"] = (
                Intervals.from_dict(self.config.calibration).words.law(found).log_sf(action.threshold)
            )
        return {"logits": found.loc, **further}

    @torch.no_grad()
    def generate(  # type: ignore[override, unused-ignore]  # numbers go with the ids
        self,
        input_ids: Tensor | None = None,
        numeric_values: Tensor | None = None,
        mode: ModeName | None = None,
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

        mode: as in `generate.modes.mode_names`, default standard. The other arguments are Hugging Face's, if they have
        a meaning here (`generate.hugging_face.translate`): a GenerationConfig or its fields as options, streamers,
        stopping criteria, stop_strings (with the tokenizer); processors of logits in mode compatible. Further options
        are those of `generate.generator.generate`: decode_rule, seed, generator, number_first, eps_truncation,
        used_rows, watch. Raises `UserError`.
        """
        ids = inputs if input_ids is None else input_ids
        prompt = Prompt.of(self, ids, numeric_values, attention_mask, options.pop("inputs_embeds", None))
        self._check(prompt.ids, prompt.values)
        call = translate(
            self,
            prompt,
            mode,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            tokenizer=tokenizer,
            watch=watch,
            given=options,
        )
        prompt = replace(prompt, mask=call.options.pop("attention_mask"))
        rows = prompt.copies(call.copies)
        given = {"attention_mask": rows.mask, "inputs_embeds": rows.embeds, **call.options}
        written, numbers = generate(self.model, rows.ids, rows.values, **given)
        written, numbers = written[:, prompt.hidden :], numbers.until(None, prompt.hidden)
        if streamer is not None:
            streamer.end()
        if call.as_output:
            return with_numbers(written, numbers)
        return (written, numbers) if return_numbers else written

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As transformers', with the code that the folder needs if this package is not installed.

        Raises `UserError` for the model of a run with `model.quantize`.
        """
        if getattr(self, "hf_quantizer", None) is None:  # transformers writes the scales of quantised weights
            refuse_rounded(self)
        # If this class is a folder's copy, transformers copies its file
        if __name__.startswith("cqwen_dist.") and options.get("is_main_process", True):
            write_code = from_wing("code of a folder")
            self.config.auto_map = write_code(save_directory, self.config.lora is not None, self.model.beside)
        super().save_pretrained(save_directory, *args, **options)

    def merge_adapters(self) -> None:
        """Fold LoRA into the backbone, in place."""
        merge_lora(self.model.transformer)
        self.config.lora = self.model.config.lora = None
