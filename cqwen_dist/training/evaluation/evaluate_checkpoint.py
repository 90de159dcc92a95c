"""`cqwen eval`: evaluates a checkpoint or an exported folder in one process, like the training run."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from cqwen_dist.checkpoint.resume import refuse_exchanged
from cqwen_dist.checkpoint.trained import is_exported, load_trained, run_of
from cqwen_dist.config import Config, UserError
from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.prediction.learnt_table import LearntTable, differences, learnt_table
from cqwen_dist.run.files import START, STATE, read_object
from cqwen_dist.training.evaluation.evaluator import Evaluator


def evaluate_checkpoint(
    path: Path,
    data: str | None,
    micro_batch_size: int = 8,
    *,
    base: str | None = None,
    label_set: float | None = None,
) -> dict[str, float]:
    """The metrics of `training.evaluation.evaluator` on `data` (default: the run's held-out texts).

    Includes metrics of the base model on the same texts: `base`, or the run's base. For an exported folder, `data` is
    required and read as by the run, or its field `text` if the folder has no table.json; a base model is measured only
    if `base` is given. If `data` is given, the interval factors saved with the model are tested too. Raises
    `UserError`.
    """
    run, learnt = _run_of(path, data)
    model, tokenizer = load_trained(path)
    dataset = _dataset(run, data, tokenizer, None if learnt is None else learnt.described())
    if data is None:
        saved = read_object(run_of(path)[1] / STATE).get("inputs", {})
        refuse_exchanged(saved, {"eval": dataset.digest()}, (), path, "--data FILE")
    with distributed(alone=True) as runtime:
        inner = model.model.to(runtime.device)
        if data is None and inner.beside is not None:
            inner.beside.train()  # each text uses the fit that left this text out
        evaluator = Evaluator(
            inner,
            inner.kept_features,
            EvalLoader(dataset, rank=0, world=1, micro_batch_size=micro_batch_size),
            build_groups(1),
            baseline_value=None if learnt is None else learnt.median,
            gemm_dtype=model.dtype,
            label_set=label_set,
            known=Intervals() if data is None else Intervals.from_dict(inner.config.calibration),
        )
        if evaluator.of_words and (base is not None or not is_exported(path)):
            evaluator.base = _measured_base(run, base, tokenizer, evaluator)
        return evaluator()


def _measured_base(run: Config, base: str | None, words: NumericalAwareTokenizer, of: Evaluator) -> dict[str, float]:
    """Top-1 and perplexity of the run's own base (None), as the run measured it, or of a different base.

    A different base is whole. It knows <NUM> only if a run has made it. Raises `UserError` if it has too few words.
    """
    name, rounded, spells = run.base_folder, run.model.quantize, run.spells_numbers
    if base is not None:
        name, rounded, spells = base, "none", not (Path(base).expanduser() / POLICY_FILE).is_file()
    rows, used = of.model.config.vocab_size, of.model.config.used_rows
    own = rows - of.model.config.added_rows
    how = of.gemm_dtype, run.model.trust_remote_code, rounded, of.device
    found: Any = load_base(name, *how, lambda count: rows if count == own else count)
    if found.config.vocab_size < used:
        raise UserError("--base", name, f"a model with at least {used} words")
    numerals = words.numeral_ids if spells else []
    known: dict[str, Any] = {"num_token_id": words.num_token_id, "digit_rows": words.digit_rows, "numerals": numerals}
    model = CausalQwenModel.from_base_model(found, start="seed", **known).to(of.device).eval()
    return replace(of, model=model, features=model.kept_features, numerals=numerals).measure_base()


def _run_of(path: Path, data: str | None) -> tuple[Config, LearntTable | None]:
    """The config, of an export what it has of the run's, and how rows are read. Raises `UserError`."""
    if is_exported(path):
        if data is None:
            raise UserError("--data", "no value", "a file or bundled:NAME (an exported folder has no data)")
        learnt = learnt_table(path)
        known = {} if learnt is None else learnt.to_dict()
        tree = {"model": {"name_or_path": str(path)}, "data": {**known.get("data", {}), "train": data}}
        return Config.model_validate(tree), learnt
    run, _ = run_of(path)
    if not read_object(Path(run.run.dir) / START):
        raise UserError(START, "no such file", "the file that the run wrote when it began", run.run.dir)
    return run, learnt_table(path)


def _dataset(
    run: Config, data: str | None, tokenizer: NumericalAwareTokenizer, columns: dict[str, Any] | None
) -> TextDataset:
    """`data`, or the run's held-out texts. Logs how its columns differ from the run's `columns`. Raises `UserError` if
    there are no texts."""
    if data is None:
        dataset = load_datasets(run.data, tokenizer).eval
    else:
        for difference in differences(data, run.data, columns or {}):
            logging.getLogger(__name__).warning("%s", difference)
        texts = read_texts(data, run.data, ReadReport(columns=columns), "--data", Chat(tokenizer.tokenizer))
        dataset = tokenise(texts, tokenizer, run.data)
    if dataset is None or not len(dataset):
        raise UserError("--data", "no texts", "held-out texts (the run held none out)")
    return dataset
