"""The oracle of the matrix: one process, torch's AdamW and clipping, the seeds' materialised loss, all rows at once.

Nothing of `parallel/` or `train/` is used here: groups, learning rates and what wakes when are written out again.
"""

import math
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from support.tiny import NUM, VOCAB, random_batch, tiny_model
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config.shape import CHARACTERS, PLACES
from cqwen_dist.data.write_numbers import in_decimals
from cqwen_dist.heads.seed_losses import CausalQwenLoss
from cqwen_dist.model import CausalQwenModel

STEPS = 6
ROWS = 12  # sequences of an optimizer step; the last third without a number
LR, SCALES_LR = 1e-3, 1e-2
CLIP = 0.5  # far below every norm seen: clipping is always active
DECAY = 0.01
LORA = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
HEADS = ["heads"]
# `embedding` sleeps in the second stage and wakes again in the third, with fresh moments; the heads' carry over.
KINDS: dict[str, list[list[str]]] = {
    "heads": [HEADS],
    "heads+lora": [[*HEADS, "embedding"], [*HEADS, "lora"], [*HEADS, "embedding", "lora"]],
    # One C for all words, held by every rank; P of <NUM> in the gate with its gradient.
    "scalar C, full gate": [[*HEADS, "embedding"]],
}
COLUMN = ("heads", "heads+lora")  # of the matrix


def gate_grad_of(kind: str) -> str:
    return "full" if "full gate" in kind else "stop"


class Trained(NamedTuple):
    """What a training leaves: by step, losses and gradient norms (before clipping); every parameter by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    start: dict[str, Tensor]


def step_batch(step: int) -> Batch:
    """All sequences of one optimizer step, [ROWS, 10]: two thirds with numbers, then some without."""
    return join([random_batch(8, 10, seed=step), random_batch(4, 10, numbers=False, seed=100 + step)])


def join(batches: list[Batch]) -> Batch:
    """Batches of one width below each other."""
    return Batch(**{name: torch.cat([getattr(b, name) for b in batches]) for name in vars(batches[0])})


def fresh_model(kind: str, **shape: Any) -> CausalQwenModel:
    """The model at its start; `shape` may hold the range of rows."""
    lora = LORA if kind == "heads+lora" else None
    more = {"wide": 64, "candidates": "arithmetic"} if lora else {}
    return with_tables(tiny_model(number_dims=2, lora=lora, scalar_threshold="scalar C" in kind, **more, **shape))


def with_tables(model: CausalQwenModel) -> CausalQwenModel:
    """Its wide part read as in training, by tables that are not 0."""
    if model.wide is not None:
        model.wide.train().weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return model


def group_of(name: str) -> str | None:
    """The trainable group of a parameter of `CausalQwenModel`; None: frozen."""
    if ".lora_" in name:
        return "lora"
    if name in ("features.embedding.w_num", "features.embedding.num_row"):
        return "embedding"
    frozen = name.startswith(("features.", "wide.")) or name == "action.cls_bias"
    return None if frozen else "heads"


def candidates_of(batch: Batch, row: int, place: int) -> dict[int, float]:
    """The values of `model.candidates: arithmetic` by their number, where no token is a sign and no number common."""
    read = [float(batch.numeric_values[row, i]) for i in range(place, -1, -1) if batch.input_ids[row, i] == NUM]
    found = dict(enumerate(read[:PLACES]))
    if len(read) > 1:
        y, x = read[:2]
        with suppress(ZeroDivisionError):
            found[PLACES + 4] = x / y
        with suppress(ZeroDivisionError):
            found[PLACES + 7] = y / x
        for j, value in ((1, x + y), (2, x - y), (3, x * y), (5, x * y / 100), (6, y - x)):
            found[PLACES + j] = value
    return {j: float(f"{value:.12g}") if j >= PLACES else value for j, value in found.items()}


def forms(candidates: dict[int, float], j: int) -> list[int]:
    """The rows of candidate j beside its own: again, first character, first two, length."""
    others = sum(candidates[i] == candidates[j] for i in candidates if i < PLACES and i != j)
    numeral = [CHARACTERS.index(character) for character in in_decimals(candidates[j])]
    first, second = (*numeral, 12)[:2]
    length = min(len(numeral), 7)
    return [2 * (j >= PLACES) + (others > 0), 4 + first, 16 + 13 * first + second, 159 + length - 1]


def candidate_loss(model: CausalQwenModel, batch: Batch) -> Tensor:
    """The cross entropies of `model.candidates: arithmetic`, one by one."""
    action, u = model.action, model.infer(batch.input_ids, batch.numeric_values, batch.attention_mask)
    (loc, scale), total = action.word_part(action.add_noise(u)), u.loc.new_zeros(())
    for row, place in batch.numeric_mask.nonzero().tolist():
        candidates, label = candidates_of(batch, row, place), float(batch.numeric_labels[row, place])
        for j, value in candidates.items():
            of = forms(candidates, j)
            weight = action.candidate_weight[j] + action.candidate_forms[of].sum(0)
            bias = action.candidate_bias[j] + action.candidate_form_bias[of].sum()
            spread = scale[row, place] @ weight.abs() + action.candidate_noise[j].abs()
            p = 0.5 + ((loc[row, place] @ weight + bias) / spread).atan() / math.pi
            equal = abs(value - label) <= 1e-9 * max(abs(label), 1.0)
            total = total - (p if equal else 1 - p).log()
    return total


def train_plainly(kind: str) -> Trained:
    """STEPS steps over the stages of `kind`, equally long."""
    model = fresh_model(kind).train()
    loss_fn = CausalQwenLoss(VOCAB, NUM, model.action.threshold, gate_grad=gate_grad_of(kind))
    trained = {name: p for name, p in model.named_parameters() if group_of(name)}
    start = {name: p.detach().clone() for name, p in trained.items()}
    scales = ("abduction.scale_net.bias", "action.b_noise", "action.threshold")
    adamw = torch.optim.AdamW(
        [
            {
                "params": [p],
                "lr": SCALES_LR if name in scales else LR / 4 if ".candidate_" in name else LR,
                "weight_decay": DECAY if p.ndim > 1 and "w_num" not in name else 0.0,
            }
            for name, p in trained.items()
        ]
    )
    stages, losses, norms = KINDS[kind], [], []
    for step in range(STEPS):
        stage = step * len(stages) // STEPS
        begins = step % (STEPS // len(stages)) == 0
        for name, p in model.named_parameters():
            p.requires_grad_(group_of(name) in stages[stage])
            if begins and stage and group_of(name) in set(stages[stage]) - set(stages[stage - 1]):
                adamw.state.pop(p, None)
        batch = step_batch(step)
        scores = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
        loss, _ = loss_fn(*scores, batch.labels, batch.numeric_labels, batch.attention_mask)
        if model.config.candidates == "arithmetic":
            loss = loss + candidate_loss(model, batch) / batch.label_mask.sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return Trained(losses, norms, {name: p.detach() for name, p in trained.items()}, start)
