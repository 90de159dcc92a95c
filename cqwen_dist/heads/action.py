"""Module 4: from the individual to decisions, a score for each word and a value (seed S0 section 4)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.config.custom import unusable
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.shape import NONE
from cqwen_dist.heads.candidates import WithCandidates
from cqwen_dist.heads.number_head import NumberHead
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.parallel.groups import ALONE, Groups
from cqwen_dist.parallel.mappings import sum_partials


class ActionNetwork(nn.Module):
    """U' = U + noise; S_k = W_cls,k U' + b_cls,k for each word and Y = W_reg U' + b_reg, in closed form.

        U' ~ Cauchy(loc_U, scale_U + |b_noise|)
        S_k ~ Cauchy(W_cls,k loc + b_cls,k, |W_cls,k| scale)      Y ~ Cauchy(W_reg loc + b_reg, |W_reg| scale)

    A bias shifts a location and never enters a scale (S2 3.4). W_cls, b_cls and the thresholds C are rows of the
    vocabulary: all V, or a rank's range [vocab_start, vocab_start + rows). word_size: how many of U's dimensions words
    see (default all; the rest are number dimensions). `number_head` speaks for numbers: W_reg, b_reg and the other
    parameters that its kind has are parameters of this module. Weights are fp32 masters.
    """

    def __init__(
        self,
        causal_hidden_size: int,
        vocab_size: int,
        *,
        word_size: int | None = None,
        vocab_start: int = 0,
        rows: int | None = None,
        scalar_threshold: bool = False,
        config: Any = None,
        number_head: Callable[..., Any] | None = None,
    ) -> None:
        """config: of the model; it names the kind of number head. None: a plain head. number_head: the user's class, if
        the config names one."""
        super().__init__()
        rows = vocab_size if rows is None else rows
        self.vocab_size = vocab_size
        self.vocab_start = vocab_start
        self.word_size = causal_hidden_size if word_size is None else word_size
        self.cls_weight = nn.Parameter(torch.empty(rows, self.word_size))
        self.cls_bias = nn.Parameter(torch.zeros(rows))
        self.base_row: list[Tensor] = []  # the base's own row and bias of <NUM>, on the rank that has it
        self.base_head: WordHead | None = None  # the base's own, until training begins; None: W_cls has it whole
        self.projection_error = 0.0  # ||A - its projection|| / ||A||, if C_w < H; A: the base's head, or its logits
        self.scalar_threshold = scalar_threshold
        self.threshold = nn.Parameter(torch.zeros(1 if scalar_threshold else rows))
        self.causal_hidden_size = causal_hidden_size
        self.number_head = number_head_of(self, config, number_head)
        self.b_noise = nn.Parameter(torch.full((causal_hidden_size,), 0.1))
        self.number_head.add_scores()  # behind b_noise: a run adds the norms of gradients in this order
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Xavier for both weights (S3 4 step 4); `inherit_head` overwrites the classifier weight."""
        self.number_head.reset()
        with torch.random.fork_rng(devices=[]):  # later draws must not depend on the number of rows here
            nn.init.normal_(self.cls_weight, std=self.cls_weight.shape[1] ** -0.5)

    @property
    def rows(self) -> int:
        """Number of words in this module."""
        return self.cls_weight.shape[0]

    def add_noise(self, u: Cauchy) -> Cauchy:
        """U' [..., C] from U: scales of independent Cauchy variables add (S0 4 step 1)."""
        return Cauchy(u.loc, u.scale + self.b_noise.abs())

    def word_part(self, u: Cauchy) -> Cauchy:
        """The word part [..., word_size] of U or U' [..., C], without number dimensions.

        Number dimensions have a scale of order 1, word dimensions of 1e-5 to 1e-3. If W_cls had columns for number
        dimensions, one optimizer step on them would multiply scale_S of all words.
        """
        return Cauchy(u.loc[..., : self.word_size], u.scale[..., : self.word_size])

    def word_head(self, used_rows: int | None = None) -> WordHead:
        """W_cls, b_cls and C of this module's words. used_rows: leave out words from this row on."""
        threshold = self.threshold[0] if self.scalar_threshold else self.threshold
        return WordHead(self.cls_weight, self.cls_bias, threshold, self.vocab_start, self.vocab_size, used_rows)

    def row_norms(self) -> Tensor:
        """||W_cls,k||_1 [rows] of this module's words: scale_S,k if all dimensions of U' have scale 1."""
        return self.cls_weight.abs().sum(1)

    def scores(self, u_prime: Cauchy) -> Cauchy:
        """S [..., rows] of U' [..., C], materialised: for single positions, small models and tests."""
        return self.word_part(u_prime).affine(self.cls_weight, self.cls_bias)

    def forward(self, loc_U: Tensor, scale_U: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """loc_U, scale_U [..., C] -> loc_S, scale_S [..., rows], loc_Y, scale_Y [...] (the seeds' S2 3.4).

        Materialises [..., rows]; training uses `heads.fused_loss` instead.
        """
        u_prime = self.add_noise(Cauchy(loc_U, scale_U))
        scores, value = self.scores(u_prime), self.number_head.value(u_prime)
        scores.loc.threshold = self.threshold  # type: ignore[attr-defined]  # a loss with another C warns
        return scores.loc, scores.scale, value.loc, value.scale


def number_head_of(net: ActionNetwork, config: Any, own: Callable[..., Any] | None = None) -> NumberHead:
    """The head for a model's config; its parameters go into the action network. Raises `UserError`.

    own: the custom class named by `number_head`.
    """
    candidates = getattr(config, "candidates", NONE)
    if own is None:
        head = NumberHead(net, config)
        return head if candidates == NONE else WithCandidates(head, net, config)
    if candidates != NONE:
        raise UserError("model.candidates", candidates, "none with a number head of your own")
    try:
        found: NumberHead = own(net, config)
        if not callable(getattr(found, "decide", None)):
            raise TypeError("it is no NumberHead")
    except Exception as error:  # user code may raise anything
        allowed = "a subclass of cqwen_dist.heads.number_head.NumberHead (docs/training.md)"
        raise unusable("model.number_head", config.number_head, error, allowed) from error
    return found


@torch.no_grad()
def words_of_base(heads: Any, z: Tensor) -> tuple[Cauchy, WordHead]:
    """(law whose locations the base's own head multiplies [..., C_w or H], that head), of features z, before training.

    heads: an object with abduction and action.
    """
    action = heads.action
    if action.base_head is None:
        return action.word_part(heads.abduction(z)), action.word_head()
    loc = z[..., : action.base_head.weight.shape[1]].float()
    if action.base_head.weight.device != loc.device:
        action.base_head = action.base_head.to(loc.device)
    return Cauchy(loc, torch.zeros_like(loc)), action.base_head


def rows_of(head: WordHead, words: Sequence[int], groups: Groups = ALONE) -> tuple[Tensor, Tensor]:
    """(rows of W [k,C], b [k]) of k words on all ranks, by one all-reduce over the vocabulary group."""
    at = torch.tensor(words, dtype=torch.int64, device=head.weight.device) - head.start
    here = (at >= 0) & (at < len(head.weight))
    rows = head.weight.new_zeros(len(words), head.weight.shape[1] + 1)
    rows[here, :-1] = head.weight[at[here]]
    if head.bias is not None:
        rows[here, -1] = head.bias[at[here]]
    rows = sum_partials(rows, groups.vocab)
    return rows[:, :-1], rows[:, -1]
