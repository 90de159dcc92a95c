"""Words told right, the same words for every arm: a model that reads <NUM> and one that reads digits.

A text's words are the same tokens in both readings, numerals aside. What is not in both (a token that holds a digit and
a letter, a numeral that one reading leaves text) is measured in neither; so are the digits.
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
from cqwen_dist.bench.learn.answers import whole_texts
from cqwen_dist.bench.learn.corpora import read_items
from cqwen_dist.data.collate import Document
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_scores import vocab_parallel_scores
from cqwen_dist.training.evaluation.evaluator import perplexity, top1

ROWS = 4  # texts a batch: the ordinary way's logits are [ROWS,T,V]
Scorer = Callable[[Batch], tuple[Tensor, Tensor]]  # the first word, and the label's log-probability, of every label


def shared_words(text: str, numbers: NumericalAwareTokenizer, digits: DigitTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of each reading are words that both have; [tokens] bool each."""
    mine, theirs = np.array(numbers.encode_batch([text])[0].ids), np.array(digits.encode_batch([text])[0].ids)
    numerals = find_numbers(text, numbers.policy)
    inside = [any(s < n.end and e > n.start for n in numerals) for s, e in digits.places(text)]
    words = (np.flatnonzero(mine != numbers.num_token_id), np.flatnonzero(~np.array(inside, bool)))
    matcher = SequenceMatcher(None, mine[words[0]].tolist(), theirs[words[1]].tolist(), autojunk=False)
    masks = np.zeros(len(mine), bool), np.zeros(len(theirs), bool)
    for block in matcher.get_matching_blocks():
        masks[0][words[0][block.a : block.a + block.size]] = True
        masks[1][words[1][block.b : block.b + block.size]] = True
    return masks


def word_batches(texts: list[str], tokenizer: NumericalAwareTokenizer, source: str) -> list[Batch]:
    """Whole texts whose labels are the shared words, the end of the text, and <NUM> where the tokenizer reads it.

    source: folder of the tokenizer, to read the texts the other way too.
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
    """Top-1 and perplexity of the words alone; F1 of telling <NUM> where there is one."""
    columns = []
    for batch in batches:
        best, log_p = score(batch)
        labels = batch.labels[batch.label_mask]
        columns.append(torch.stack([labels.double(), best.double().cpu(), log_p.double().cpu()]))
    labels, best, log_p = torch.cat(columns, 1)
    number, said = labels == num_token_id, best == num_token_id
    words = ~number
    figures = {
        "words": int(words.sum()),
        "top1": float((best == labels)[words].double().mean()),
        "perplexity": perplexity(-float(log_p[words].mean())),
    }
    if number.any():
        figures["num_f1"] = 2 * float((number & said).sum()) / float(number.sum() + said.sum())
    return figures


def measured_words(
    score: Scorer, files: dict[str, str], tokenizer: NumericalAwareTokenizer, source: str
) -> dict[str, dict[str, float]]:
    """`word_metrics` of every file, by its name."""
    found = {}
    for name, file in files.items():
        batches = word_batches([item.text for item in read_items(Path(file))], tokenizer, source)
        found[name] = word_metrics(score, batches, tokenizer.num_token_id)
    return found


def causal_scorer(model: CausalQwenModel) -> Scorer:
    """Ours: the first by P, the probability by softmax(loc_S)."""
    action, groups = model.action, build_groups(1)
    device = action.cls_weight.device

    def score(batch: Batch) -> tuple[Tensor, Tensor]:
        keep = batch.kept.to(device)
        there = batch.to(device)
        u_prime = action.add_noise(model.abduction(model.kept_features(there, keep)))
        scores = vocab_parallel_scores(
            action.word_part(u_prime).to(torch.float32),
            action.word_head(model.config.used_rows),
            there.labels.flatten()[keep],
            groups.vocab,
        )
        return top1(model, u_prime, groups, torch.float32, "ovr"), scores.label_loc - scores.log_norm

    return score


def plain_scorer(model: Any) -> Scorer:
    """The ordinary way: the softmax's."""
    model.eval()
    device = next(model.parameters()).device

    def score(batch: Batch) -> tuple[Tensor, Tensor]:
        there = batch.to(device)
        logits = model(input_ids=there.input_ids, position_ids=there.position_ids, use_cache=False).logits
        logits = logits[there.label_mask].float()
        labels = there.labels[there.label_mask].unsqueeze(1)
        return logits.argmax(-1), logits.gather(1, labels)[:, 0] - logits.logsumexp(-1)

    return score
