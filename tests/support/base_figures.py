"""The figures of a base, by its own head and token table: what the heads' measure is compared with."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.heads.numerals import shown_ids
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.ovr.scores import OvrScores, ovr_scores
from cqwen_dist.training.evaluation.evaluator import base_metrics


@torch.no_grad()
def measure_base(
    base: Any,
    batches: Iterable[Batch],
    num_token_id: int,
    numerals: Sequence[int] = (),
    digit_rows: Sequence[int] = (),
) -> dict[str, float]:
    """Top-1 and perplexity of the base model at all label positions, from ids only, without values of numbers.

    base: a causal language model of transformers with its output head, all V rows. numerals: tokens with which it
    spells numerals, if it never saw <NUM>. Their mean embedding replaces <NUM> in the input, and at a number label each
    of them is right, as at the start of a run. digit_rows: <NUM> reads as its numeral's first character.
    """
    base.eval()
    head, table = base.get_output_embeddings(), base.get_input_embeddings()
    device = head.weight.device
    spelt = torch.tensor(list(numerals), dtype=torch.int64, device=device)
    rows, bias = head.weight[spelt], 0.0 if head.bias is None else head.bias[spelt]
    digits, first = table(spelt).float().mean(0), torch.tensor(digit_rows, device=device)

    def scored() -> Iterator[tuple[OvrScores, Tensor, Tensor]]:
        for cpu_batch in batches:
            batch, keep = cpu_batch.to(device), cpu_batch.kept.to(device)
            labels = batch.labels.flatten()[keep]
            ids = batch.input_ids
            if digit_rows:
                ids = shown_ids(ids, batch.numeric_values, num_token_id, first)
            embeddings = table(ids)
            if len(spelt) and not digit_rows:
                embeddings[batch.input_ids == num_token_id] = digits.to(embeddings.dtype)
            z = base.base_model(inputs_embeds=embeddings, position_ids=batch.position_ids, use_cache=False)[0]
            z = z.flatten(0, 1)[keep]
            u, words = Cauchy(z, torch.zeros_like(z)), WordHead.of(head.weight, head.bias, 0.0)
            yield ovr_scores(u, words, labels, rank_by="loc"), labels, z @ rows.T + bias

    return base_metrics(scored(), num_token_id, spelt)
