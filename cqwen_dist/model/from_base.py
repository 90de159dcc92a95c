"""A base model turned causal, with the start of its heads: the work of `CausalQwenForCausalLM.from_base`."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from cqwen_dist.batch import Batch
from cqwen_dist.config.bases import line_end_ids, numeral_ids, rows_used, rows_with_number
from cqwen_dist.config.data import NumberPolicy
from cqwen_dist.config.training import LossConfig
from cqwen_dist.data.from_memory import text_batches
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.base_loading import base_tokenizer, load_base
from cqwen_dist.model.calibration import LEVEL_TOKENS, calibrate
from cqwen_dist.model.causal_qwen import CausalQwenModel

logger = logging.get_logger(__name__)


def turned_causal(
    name_or_path: str,
    num_token_id: int | None,
    calibration_batches: Iterable[Batch],
    texts: Iterable[str] | None,
    **options: Any,
) -> tuple[CausalQwenModel, PreTrainedModel]:
    """The model, and the base inside it; arguments and errors as `CausalQwenForCausalLM.from_base`."""
    start = "calibrated" if calibration_batches or texts is not None else "seed"
    found = base_tokenizer(name_or_path)
    used, vocabulary = (None, {}) if found is None else (rows_used(found), found.get_vocab())
    if start == "calibrated":
        options.setdefault("w_num_scale", None)
        options.setdefault("word_terms", LossConfig().terms(calibrated=True, named=True))
        if options.setdefault("num_row_init", "digits") == "digits":
            options.setdefault("numerals", numeral_ids(vocabulary))
    else:
        logger.warning("from_base without texts: the heads start at the seeds' constants; texts=[...] calibrates them")
    options.setdefault("line_ends", line_end_ids(vocabulary))
    rows_for = None
    if used is not None:
        rows_for = partial(rows_with_number, used=used, num_token_id=used if num_token_id is None else num_token_id)
    device = options.pop("device", "cpu")
    base = load_base(name_or_path, options.pop("dtype", torch.float32), rows_for=rows_for)
    if num_token_id is None:
        num_token_id = base.config.vocab_size - 1 if used is None else used
    policy = NumberPolicy(digits=options.pop("keep_digits", False))
    if texts is not None or policy.digits:
        tokenizer = NumericalAwareTokenizer.from_pretrained(name_or_path, num_token_id, policy=policy)
        options["digit_rows"] = tokenizer.digit_rows
    if texts is not None:
        calibration_batches, unit = text_batches(texts, tokenizer, base.config.max_position_embeddings, LEVEL_TOKENS)
        options = {"number_dims": 8, "target": unit, **options}
    options.setdefault("used_rows", base.config.vocab_size if used is None else max(used, num_token_id + 1))
    model = CausalQwenModel.from_base_model(base, start=start, num_token_id=num_token_id, **options).to(device)
    if start == "calibrated":
        batches = list(calibration_batches)
        calibrate(model, batches, numerals=options.get("numerals", ()), fit_batches=batches)
    model.action.base_head = None
    return model, base
