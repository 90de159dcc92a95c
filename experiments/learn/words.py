"""Accuracy and perplexity of words, on the same tokens for models that read <NUM> and models that read digits.

Apart from numerals, both readings give the same tokens. A token of one reading only is not measured: one that holds a
digit and a letter, or a numeral that one reading leaves as text. Digits are not measured either.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.store import Document
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.heads.numerals import given_digits
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_scores
from cqwen_dist.training.evaluation.evaluator import perplexity
from experiments.learn.answers import whole_texts
from experiments.learn.corpora import read_items

ROWS = 4  # texts in a batch: the logits of plain arms are [ROWS,T,V]
Scorer = Callable[[Batch], tuple[Tensor, Tensor]]  # best word [N] and log-probability of the label [N]


def shared_words(text: str, numbers: NumericalAwareTokenizer, digits: DigitTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the words that both readings share, for each reading: [tokens] bool."""
    (ids, values), theirs = numbers.encode_batch([text])[0], np.array(digits.encode_batch([text])[0].ids)
    mine = np.array(ids)
    is_number = mine == numbers.num_token_id
    if numbers.digit_rows:
        behind = given_digits(torch.from_numpy(is_number)[None], torch.tensor([values], dtype=torch.float64))
        is_number |= behind[0].numpy()
    numerals = find_numbers(text, numbers.policy)
    offsets = digits._backend.encode(text, add_special_tokens=False).offsets
    inside = [any(s < n.end and e > n.start for n in numerals) for s, e in offsets]
    words = (np.flatnonzero(~is_number), np.flatnonzero(~np.array(inside, bool)))
    matcher = SequenceMatcher(None, mine[words[0]].tolist(), theirs[words[1]].tolist(), autojunk=False)
    masks = np.zeros(len(mine), bool), np.zeros(len(theirs), bool)
    for block in matcher.get_matching_blocks():
        masks[0][words[0][block.a : block.a + block.size]] = True
        masks[1][words[1][block.b : block.b + block.size]] = True
    return masks


def word_batches(texts: list[str], tokenizer: NumericalAwareTokenizer, source: str) -> list[Batch]:
    """Whole texts. Labels are the shared words, the end of the text, and <NUM> where the tokenizer reads it.

    source: folder of the tokenizer, from which the tokenizer of the other reading is loaded.
    """
    spelling = isinstance(tokenizer, DigitTokenizer)
    other = (NumericalAwareTokenizer if spelling else DigitTokenizer).from_pretrained(source, policy=tokenizer.policy)
    numbers, digits = (other, tokenizer) if spelling else (tokenizer, other)
    assert isinstance(digits, DigitTokenizer)
    documents = []
    for text, encoded in zip(texts, tokenizer.encode_batch(texts), strict=True):
        ids = np.array([*encoded.ids, tokenizer.eos_token_id])
        learnt = np.append(shared_words(text, numbers, digits)[int(spelling)], True)
        values, none = np.array([*encoded.values, 0.0]), np.zeros(len(ids), bool)
        documents.append(Document(ids, values, none, learnt | (ids == tokenizer.num_token_id)))
    return whole_texts(documents, tokenizer, ROWS)


@torch.no_grad()
def word_metrics(score: Scorer, batches: list[Batch], num_token_id: int) -> dict[str, float]:
    """Top-1 and perplexity of words; F1 of <NUM> if any label is <NUM>."""
    columns = []
    for batch in batches:
        best, log_p = score(batch)
        labels = batch.labels[batch.label_mask]
        columns.append(torch.stack([labels.double(), best.double().cpu(), log_p.double().cpu()]))
    labels, best, log_p = torch.cat(columns, 1)
    number, predicted = labels == num_token_id, best == num_token_id
    words = ~number
    metrics = {
        "words": int(words.sum()),
        "top1": float((best == labels)[words].double().mean()),
        "perplexity": perplexity(-float(log_p[words].mean())),
    }
    if number.any():
        metrics["num_f1"] = 2 * float((number & predicted).sum()) / float(number.sum() + predicted.sum())
    return metrics


def measured_words(
    score: Scorer, files: dict[str, str], tokenizer: NumericalAwareTokenizer, source: str
) -> dict[str, dict[str, float]]:
    """`word_metrics` of every file, by name."""
    found = {}
    for name, file in files.items():
        batches = word_batches([item.text for item in read_items(Path(file))], tokenizer, source)
        found[name] = word_metrics(score, batches, tokenizer.num_token_id)
    return found


def causal_scorer(model: CausalQwenModel) -> Scorer:
    """Scorer of CausalQwen: ranks by the one-vs-rest probability P, takes log-probabilities of softmax(loc_S)."""
    action, groups = model.action, build_groups(1)
    device = action.cls_weight.device

    def score(batch: Batch) -> tuple[Tensor, Tensor]:
        positions, on_device = batch.kept.to(device), batch.to(device)
        u_prime = action.add_noise(model.abduction(model.kept_features(on_device, positions)))
        scores = vocab_parallel_scores(
            action.word_part(u_prime).to(torch.float32),
            action.word_head(model.config.used_rows),
            on_device.labels.flatten()[positions],
            groups.vocab,
        )
        return scores.best.word, scores.label_loc - scores.log_norm

    return score


def plain_scorer(model: Any) -> Scorer:
    """Scorer of a causal language model with a softmax."""
    model.eval()
    device = next(model.parameters()).device

    def score(batch: Batch) -> tuple[Tensor, Tensor]:
        on_device = batch.to(device)
        logits = model(input_ids=on_device.input_ids, position_ids=on_device.position_ids, use_cache=False).logits
        logits = logits[on_device.label_mask].float()
        labels = on_device.labels[on_device.label_mask].unsqueeze(1)
        return logits.argmax(-1), logits.gather(1, labels)[:, 0] - logits.logsumexp(-1)

    return score
