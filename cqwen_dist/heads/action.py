"""Module 4: from the individual to decisions, a score for every word and a value (seed S0 section 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead

COPY_NOISE = 0.3  # where S_j is fitted to -1 and 1


class ActionNetwork(nn.Module):
    """U' = U + noise; S_k = W_cls,k U' + b_cls,k for every word and Y = W_reg U' + b_reg, in closed form.

        U' ~ Cauchy(loc_U, scale_U + |b_noise|)
        S_k ~ Cauchy(W_cls,k loc + b_cls,k, |W_cls,k| scale)      Y ~ Cauchy(W_reg loc + b_reg, |W_reg| scale)

    A bias shifts a location and never enters a scale (S2 3.4). W_cls, b_cls and the thresholds C are rows of the
    vocabulary: all V, or a rank's range [vocab_start, vocab_start + rows). word_size: how many of U's dimensions words
    see (default all; the rest are number dimensions). W_reg is [C]; with R values a position (S4 4.7.1) [R, C]; with T
    types of numbers (S4 4.7.2) [2T, C]: the values of each type, then the types' own scores S_t, P_t = P(S_t > 0).
    With K copies a number may also be the j-th last one before it: a type of number whose value is known. Its score
    S_j is of U's word part plus a Cauchy of its own with scale |c_j|; P_j = P(S_j > 0). Weights are fp32 masters.
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
        values: int | None = None,
        types: int | None = None,
        copies: int = 0,
    ) -> None:
        super().__init__()
        rows = vocab_size if rows is None else rows
        self.vocab_size = vocab_size
        self.vocab_start = vocab_start
        self.word_size = causal_hidden_size if word_size is None else word_size
        self.cls_weight = nn.Parameter(torch.empty(rows, self.word_size))
        self.cls_bias = nn.Parameter(torch.zeros(rows))
        self.threshold = nn.Parameter(torch.zeros(()) if scalar_threshold else torch.zeros(rows))
        self.types = types
        several = values if types is None else 2 * types
        shape = () if several is None else (several,)
        self.reg_weight = nn.Parameter(torch.empty(*shape, causal_hidden_size))
        self.reg_bias = nn.Parameter(torch.zeros(shape))
        self.b_noise = nn.Parameter(torch.full((causal_hidden_size,), 0.1))
        self.copies = copies
        if copies:
            self.copy_weight = nn.Parameter(torch.zeros(copies, self.word_size))
            self.copy_bias = nn.Parameter(torch.full((copies,), -1.0))  # until the start is calibrated: none is likely
            self.copy_noise = nn.Parameter(torch.full((copies,), COPY_NOISE))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Xavier for both weights (S3 4 step 4); `inherit_head` overwrites the classifier's."""
        for row in self.reg_weight.view(-1, 1, self.reg_weight.shape[-1]):
            nn.init.xavier_uniform_(row)
        with torch.random.fork_rng(devices=[]):  # later draws must not depend on the number of rows here
            nn.init.normal_(self.cls_weight, std=self.cls_weight.shape[1] ** -0.5)

    @property
    def rows(self) -> int:
        """Words this module holds."""
        return self.cls_weight.shape[0]

    def add_noise(self, u: Cauchy) -> Cauchy:
        """U' of U: independent scales add (S0 4 step 1). [..., C]."""
        return Cauchy(u.loc, u.scale + self.b_noise.abs())

    def word_part(self, u: Cauchy) -> Cauchy:
        """U or U' [..., C] without the number dimensions, [..., word_size]: the part that words see.

        Words must not see number dimensions: their scale is of order 1, the words' is 1e-5 to 1e-3, so one optimizer
        step of W_cls on them would multiply every word's scale_S.
        """
        return Cauchy(u.loc[..., : self.word_size], u.scale[..., : self.word_size])

    def word_head(self, used_rows: int | None = None) -> WordHead:
        """This module's rows of words: W_cls, b_cls, C. used_rows: words from here on are left out."""
        return WordHead(self.cls_weight, self.cls_bias, self.threshold, self.vocab_start, self.vocab_size, used_rows)

    def row_norms(self) -> Tensor:
        """||W_cls,k||_1 of each word of this module, [rows]: scale_S,k where every dimension of U' has scale 1."""
        return self.cls_weight.abs().sum(1)

    def value(self, u_prime: Cauchy) -> Cauchy:
        """Y of U' [..., C]: Cauchy [...] in fp32, in the unit of the targets (`CausalQwenConfig.target`).

        With several values it is the first; with several types the value of the likeliest (`number_type`).
        """
        if self.reg_weight.ndim == 1:
            return u_prime.affine(self.reg_weight, self.reg_bias)
        if self.types is None:
            return u_prime.affine(self.reg_weight[0], self.reg_bias[0])
        laws, kind = self.values(u_prime), self.number_type(u_prime).unsqueeze(-1)
        return Cauchy(laws.loc.gather(-1, kind)[..., 0], laws.scale.gather(-1, kind)[..., 0])

    def values(self, u_prime: Cauchy) -> Cauchy:
        """All R values, or the value of each of T types: [..., R]. Each is exact by itself; together they depend."""
        return u_prime.affine(self.reg_weight[: self.types], self.reg_bias[: self.types])

    def type_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_t of each of T types, [..., T]: the type t holds with P(S_t > 0), one against the rest as words."""
        return u_prime.affine(self.reg_weight[self.types :], self.reg_bias[self.types :])

    def number_type(self, u_prime: Cauchy) -> Tensor:
        """The likeliest type [...] int64, by the decision strength, which has the order of P_t."""
        scores = self.type_scores(u_prime)
        return (scores.loc / scores.scale.clamp(min=1e-30)).argmax(-1)  # an individual without noise has scale 0

    def copy_scores(self, u_prime: Cauchy) -> Cauchy:
        """S_j of the K last numbers, [..., K]."""
        scores = self.word_part(u_prime).affine(self.copy_weight, self.copy_bias)
        return Cauchy(scores.loc, scores.scale + self.copy_noise.abs())

    def copied(self, u_prime: Cauchy, recent: Tensor) -> Tensor:
        """The number that is copied, [...] float64; NaN where none is: where no P_j of a number there is exceeds 1/2.

        recent [..., K]: the numbers, raw unit, NaN where there are fewer (`batch.recent_numbers`).
        """
        scores = self.copy_scores(u_prime)
        strength = (scores.loc / scores.scale.clamp(min=1e-30)).masked_fill(recent.isnan(), -torch.inf)
        best = strength.max(-1)
        found = recent.gather(-1, best.indices.unsqueeze(-1))[..., 0]
        return found.masked_fill(best.values <= 0, torch.nan)

    def scores(self, u_prime: Cauchy) -> Cauchy:
        """S of U' [..., C]: Cauchy [..., rows], materialised, so for one position, small models and tests."""
        return self.word_part(u_prime).affine(self.cls_weight, self.cls_bias)

    def forward(self, loc_U: Tensor, scale_U: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """loc_U, scale_U [..., C] -> loc_S, scale_S [..., rows], loc_Y, scale_Y [...] (the seeds' S2 3.4).

        Materialises [..., rows]; training never comes here (see `heads.fused_loss`).
        """
        u_prime = self.add_noise(Cauchy(loc_U, scale_U))
        scores, value = self.scores(u_prime), self.value(u_prime)
        return scores.loc, scores.scale, value.loc, value.scale
