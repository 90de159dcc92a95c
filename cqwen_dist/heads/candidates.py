"""Exact values that the next number may have, each with a one-vs-rest score (`model.candidates`): the last `PLACES`
numbers of the text, the value of the expression that it has just written (`heads.expression`), operations on the last
two numbers, and the commonest numbers of the training data.

S_j is linear in U's word part, plus an independent Cauchy with scale |c_j|. Its row is w_j plus a row for each of the
candidate's `FORMS`: the first character of its numeral, the first two, and its length, as a base that sees digits knows
how the number will look; and whether the text has the value already (`again`), as a number that was used is rarely used
again. P_j = P(S_j > 0). All candidates that equal the number are right. The likeliest is written if its P exceeds a bar
that held-out numbers set (`best_bar`).

Letters as in `heads.number_head`, and J candidates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cqwen_dist.batch import Batch
from cqwen_dist.config.shape import CHARACTERS, CONSTANTS, FORM_ROWS, FORMS, PLACES
from cqwen_dist.heads.expression import OTHER, STATE, VALUE, read_tokens, states_at, symbol_table
from cqwen_dist.heads.number_head import Decision, NumberHead, NumberLabels, decision_strength, one_against_the_rest
from cqwen_dist.heads.numerals import characters
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.tiles import CANDIDATE_BUFFERS, CANDIDATE_BYTES, kind_of

NOISE = 0.3  # of a score at the start, whose ridge regression fits S_j to -1 and 1
LINK = 0.25  # the first characters' rows at the start, as a fraction of the base's (docs/measurements.md)
# The start's softmax regression: its parameters, its ridge and its steps at most (docs/measurements.md)
SHARPENED = "candidate_weight", "candidate_forms", "candidate_bias", "candidate_form_bias"
HELD, SHARPENINGS = 400.0, 20
OPERATIONS = ("x + y", "x - y", "x * y", "x / y", "x * y / 100", "y - x", "y / x")  # x: the last but one, y: the last
OF_PLACES = ["the last number", *(f"the number {back} before" for back in range(2, PLACES + 1))]
EXPRESSION = "the expression before it"
SAME = 1e-9  # relative: a computed value is rounded to 12 digits
LEAST_GAIN, TELLING = 0.1, 32  # of `best_bar`
EXACT_TENS = torch.tensor([10.0**k for k in range(23)], dtype=torch.float64, device="cpu")  # exact in float64


@dataclass(frozen=True)
class CandidateLabels(NumberLabels):
    at: Tensor  # [M] int64: which of the N positions are numbers
    candidates: Tensor  # [M,J] float64: the values, NaN where there is none
    raw: Tensor  # [M]: the value, raw unit


class WithCandidates(NumberHead):
    """Wraps a head (`inner`) and adds J scores S_j: is the number equal to candidate j?"""

    exact = True

    def __init__(self, inner: NumberHead, net: Any, config: Any) -> None:
        self.inner, self.net, self.config = inner, net, config
        self.names = [*OF_PLACES, EXPRESSION, *OPERATIONS, *["a common number"] * CONSTANTS]
        self.memory_size = PLACES + STATE
        self._on_device: dict[torch.device, tuple[object, list[Tensor]]] = {}

    def add_scores(self) -> None:
        net, count = self.net, len(self.names)
        net.candidate_weight = nn.Parameter(torch.zeros(count, net.word_size))
        net.candidate_bias = nn.Parameter(torch.full((count,), -1.0))  # until the start is fitted: none is likely
        net.candidate_noise = nn.Parameter(torch.full((count,), NOISE))
        net.candidate_forms = nn.Parameter(torch.zeros(FORM_ROWS, net.word_size))
        net.candidate_form_bias = nn.Parameter(torch.zeros(FORM_ROWS))

    def value(self, u_prime: Cauchy) -> Cauchy:
        return self.inner.value(u_prime)

    def scores(self, u_prime: Cauchy, values: Tensor) -> Cauchy:
        """S_j [...,J] of the candidates' values [...,J]."""
        net, u = self.net, self.net.word_part(u_prime)
        forms, table = forms_of(values), F.pad(net.candidate_forms, (0, 0, 0, 1))  # no form: a row of zeros
        told = F.linear(u.loc, net.candidate_forms, net.candidate_form_bias)
        loc = _with_forms(F.linear(u.loc, net.candidate_weight, net.candidate_bias), told, forms)
        return Cauchy(loc, _scales(u.scale, forms, net.candidate_weight, table) + net.candidate_noise.abs())

    def candidates(self, memory: Tensor) -> Tensor:
        """The values [...,J] float64 of a memory [...,K]; NaN where there is none."""
        y, x = memory[..., 0], memory[..., 1]
        computed = [memory[..., PLACES + VALUE], x + y, x - y, x * y, x / y, x * y / 100, y - x, y / x]
        _, constants, tens = self._tables(memory.device)
        found = to_12_digits(torch.stack(computed, -1), tens)
        every = torch.cat([memory[..., :PLACES], found, constants.expand(*found.shape[:-1], -1)], -1)
        return every.masked_fill(every.isinf(), torch.nan)

    def decide(self, u_prime: Cauchy, memory: Tensor, bar: float = 0.5) -> Decision:
        own, values = self.inner.decide(u_prime, memory), self.candidates(memory.to(u_prime.loc.device))
        strength, sure = decision_strength(self.scores(u_prime, values)), torch.zeros_like(values, dtype=torch.bool)
        sure[..., PLACES] = ~values[..., PLACES].isnan()  # behind an expression that has a value this is written
        shut = values.isnan() | (sure.any(-1, keepdim=True) & ~sure)
        best = strength.masked_fill(shut, -torch.inf).max(-1)
        value = values.gather(-1, best.indices.unsqueeze(-1))[..., 0]
        p = (0.5 + best.values.atan() / math.pi).masked_fill(value.isnan(), 0.0)
        found = value.masked_fill((p <= bar) & ~sure.any(-1), torch.nan)
        loc = self.target.forward(found).where(~found.isnan(), own.y.loc)
        return own._replace(y=own.y._replace(loc=loc), exact=found, which=best.indices, likeliest=value, p=p)

    # ---------------------------------------------------------------------------------------------- memory

    def memory(self, ids: Tensor, is_number: Tensor, values: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """The last numbers up to and including each token, latest first; NaN if there are fewer. Then the state of the
        expression's reader."""
        if not len(at):
            return values.new_zeros(0, self.memory_size)
        back = torch.arange(PLACES, device=values.device)
        number = is_number.flatten()
        before = is_number.long().cumsum(1)  # numbers of the row up to here
        begun = torch.where(positions == 0, before - is_number.long(), 0).cummax(1).values  # in earlier packed texts
        known = (before - begun).flatten()[at].unsqueeze(-1) > back
        rank = number.long().cumsum(0)[at].unsqueeze(-1) - 1 - back
        listed = values.flatten().gather(0, number.long().argsort(descending=True, stable=True))
        places = listed[rank.clamp(min=0)].masked_fill(~known, torch.nan)
        symbols = self._symbols(ids, is_number)
        return torch.cat([places, states_at(symbols, values, positions, at)], -1)

    def remember(self, memory: Tensor, ids: Tensor, value: Tensor, is_number: Tensor) -> None:
        places = memory[:, :PLACES]
        latest = torch.cat([value[:, None], places[:, :-1]], 1).where(is_number[:, None], places)
        state = read_tokens(memory[:, PLACES:], self._symbols(ids, is_number), value)
        memory.copy_(torch.cat([latest, state], 1))

    def _symbols(self, ids: Tensor, is_number: Tensor) -> Tensor:
        """[...,A_TOKEN] int8. A <NUM> that padding has covered is no number."""
        masked = (ids == self.config.num_token_id) & ~is_number
        return self._tables(ids.device)[0][ids].masked_fill(masked.unsqueeze(-1), OTHER)

    def _tables(self, device: torch.device) -> list[Tensor]:
        """The tokens' symbols, the constants (NaN where there are fewer) and `EXACT_TENS`. They stay on the device: a
        copy from the host in each step would wait, and a CUDA graph cannot hold one."""
        config = self.config
        made_of, found = self._on_device.get(device, (None, []))
        if made_of is not config.symbols:
            constants = torch.full((CONSTANTS,), math.nan, dtype=torch.float64, device="cpu")
            known = torch.tensor(config.constants[:CONSTANTS], dtype=torch.float64, device="cpu")
            constants[: len(known)] = known
            symbols = symbol_table(config.symbols, config.vocab_size, config.num_token_id)
            found = [table.to(device) for table in (symbols, constants, EXACT_TENS)]
            self._on_device[device] = config.symbols, found
        return found

    # ------------------------------------------------------------------------------------ labels, loss, start

    def labels(self, batch: Batch, keep: Tensor) -> NumberLabels:
        own, places = self.inner.labels(batch, keep), batch.number_places
        raw, held = batch.numeric_labels.flatten()[places], self.candidates(self.memory_at(batch, places))
        return CandidateLabels(own.values, own.is_number, torch.searchsorted(keep, places), held, raw)

    def loss(self, u_prime: Cauchy, labels: NumberLabels) -> tuple[Tensor, Tensor]:
        """The loss of `inner`, plus one-vs-rest cross entropies for "the label equals this candidate". If words have a
        softmax term, so have candidates, over loc_S / scale_S, by which the likeliest is chosen."""
        assert isinstance(labels, CandidateLabels)
        numbers = Cauchy(*(part[labels.at] for part in u_prime))
        scores, right = self.scores(numbers, labels.candidates), equal(labels.candidates, labels.raw)
        known = ~labels.candidates.isnan()
        nll, decided = self.inner.loss(u_prime, labels)
        decided = decided + torch.where(known, one_against_the_rest(scores, right), 0.0).sum()
        if weight := self.config.word_terms.get("softmax_weight", 0.0):
            decided = decided + weight * among_the_rest(decision_strength(scores), known, right & known).sum()
        return nll, decided

    def start(self, coefficients: Tensor, intercept: float) -> None:
        self.inner.start(coefficients, intercept)

    def score_targets(self, values: Tensor, memory: Tensor) -> Tensor:
        """1 if the value equals the candidate, otherwise -1."""
        return equal(self.candidates(memory), values).double() * 2 - 1

    @torch.no_grad()
    def start_scores(self, weight: Tensor, bias: Tensor) -> None:
        self.net.candidate_weight.copy_(weight)
        self.net.candidate_bias.copy_(bias)

    def sharpened(self, x: Tensor, values: Tensor, memory: Tensor, characters: Tensor | None) -> dict[str, Tensor]:
        """The rows after a softmax regression on x = loc_U [n,C_w] of n numbers. A number's candidates compete; the
        start's ridge regressions fit one row each. A ridge holds the rows near that start with a share of the base's
        `characters`. No softmax sees what all scores have in common: the biases move by one shift of least one-vs-rest
        loss.

        A number has no part in the softmax if no candidate is right or an expression decides. In float64 and by all
        numbers at once, so that their order does not matter.
        """
        parts, rows = [getattr(self.net, name).detach().double() for name in SHARPENED], [len(self.names), FORM_ROWS]
        weight, bias = torch.cat(parts[:2]), torch.cat(parts[2:])
        if characters is not None:
            first = rows[0] + FORMS["again"]
            weight[first : first + FORMS["first"]] += LINK * (characters - characters.mean(0))
        held, x = self.candidates(memory), x.double()
        known, right, forms = ~held.isnan(), equal(held, values), forms_of(held)
        chosen = right & held[:, PLACES, None].isnan()
        mean = x.mean(0)
        unit = (x - mean).square().mean().sqrt().clamp(min=1e-12)
        begun, x = F.linear(x, weight, bias), F.pad((x - mean) / unit, (0, 1), value=1.0)

        def strength(step: Tensor) -> Tensor:
            own, told = (begun / NOISE + x @ step.T).split(rows, -1)
            return _with_forms(own, told, forms)

        def softmax(step: Tensor) -> Tensor:
            return among_the_rest(strength(step), known, chosen).mean() + HELD / 2 * step.square().sum() / len(x)

        step = minimised(softmax, x.new_zeros(len(weight), x.shape[1]))
        found = strength(step)

        def one_vs_rest(shift: Tensor) -> Tensor:
            scores = Cauchy(found + shift, torch.ones_like(found))
            return torch.where(known, one_against_the_rest(scores, right), 0.0).sum(-1).mean()

        moved = step[:, :-1] * NOISE / unit
        bias = bias + NOISE * step[:, -1] - moved @ mean
        bias[: rows[0]] += NOISE * minimised(one_vs_rest, x.new_zeros(1))
        fitted = [*(weight + moved).split(rows), *bias.split(rows)]
        return {name: part.float().cpu() for name, part in zip(SHARPENED, fitted, strict=True)}


def minimised(of: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a smooth function is least near `start`: after at most `SHARPENINGS` steps of L-BFGS."""
    at = start.requires_grad_()
    optimizer = torch.optim.LBFGS([at], max_iter=SHARPENINGS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = of(at)
        found.backward()
        return found.detach()

    with torch.enable_grad():
        optimizer.step(closure)
    return at.detach()


def _with_forms(own: Tensor, told: Tensor, forms: Tensor) -> Tensor:
    """The candidates' own scores [...,J], plus those of their forms [...,J,4] among told [...,`FORM_ROWS`]."""
    told = F.pad(told, (0, 1))
    for form in forms.unbind(-1):
        own = own + told.gather(-1, form)
    return own


def _scales(u_scale: Tensor, forms: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    """|row| @ u_scale [...,C_w], [...,J]: of the rows of J candidates, weight [J,C_w] and those of `table` at forms
    [...,J,4]. With gradients the rows are not kept: they are made again in the backward pass."""
    of_rows = partial(checkpoint, _of_rows, use_reentrant=False, preserve_rng_state=False)
    made = of_rows if torch.is_grad_enabled() else _of_rows
    most = CANDIDATE_BYTES[kind_of(u_scale.device.type)] // (CANDIDATE_BUFFERS * 4 * weight.numel())
    parts = zip(u_scale.split(max(most, 1)), forms.split(max(most, 1)), strict=True)
    return torch.cat([made(*part, weight, table) for part in parts])


def _of_rows(u_scale: Tensor, forms: Tensor, weight: Tensor, table: Tensor) -> Tensor:
    rows = weight
    for form in forms.unbind(-1):
        rows = rows + F.embedding(form, table)
    return torch.einsum("...jc,...c->...j", rows.abs(), u_scale)


def forms_of(candidates: Tensor) -> Tensor:
    """Which of `FORMS` candidates [...,J] float64 have, [...,J,4] int64, counted over all four kinds; behind the last
    if there is none."""
    shown = characters(candidates, FORMS["length"])
    first, second = shown[..., 0], shown[..., 1]
    two = first * (len(CHARACTERS) + 1) + second.where(second >= 0, len(CHARACTERS))
    length = (shown >= 0).sum(-1) - 1
    begin, kinds = FORMS["again"], []
    for kind, size in ((first, FORMS["first"]), (two, FORMS["two"]), (length, FORMS["length"])):
        kinds.append((kind + begin).where(first >= 0, FORM_ROWS))
        begin += size
    return torch.stack([again(candidates), *kinds], -1)


def again(candidates: Tensor) -> Tensor:
    """k of candidates [...,J] float64, int64: for a place of the text 0, or 1 if another place has its value; for any
    other candidate 2, or 3 if a place has its value. Exactly equal, as computed values are rounded."""
    held = (candidates.unsqueeze(-1) == candidates[..., None, :PLACES]).sum(-1)
    rest = (torch.arange(candidates.shape[-1], device=candidates.device) >= PLACES).long()
    return 2 * rest + (held > 1 - rest)


def equal(candidates: Tensor, values: Tensor) -> Tensor:
    """Whether each candidate [n,J] is the value [n], up to the rounding of a computed one; False at NaN."""
    values = values.unsqueeze(-1)
    return (candidates - values).abs() <= SAME * values.abs().clamp(min=1.0)


def among_the_rest(strength: Tensor, known: Tensor, right: Tensor) -> Tensor:
    """-log of the right candidates' share in the softmax of the known ones, [...,J] each -> [...]; 0 if none is."""
    every, own = (strength.masked_fill(~of, -1e30).logsumexp(-1) for of in (known, right))
    return (every - own).where(right.any(-1), 0.0)


def to_12_digits(values: Tensor, tens: Tensor = EXACT_TENS) -> Tensor:
    """float64 values to 12 significant digits, where a power of ten up to 1e22 can do it exactly: 0.1 * 3 is 0.3."""
    digits = 11 - values.abs().log10().floor().nan_to_num(0.0, 0.0, 0.0)
    fits = (digits >= 0) & (digits < len(tens))
    unit = tens[digits.clamp(0, len(tens) - 1).long()]
    return torch.where(fits, (values * unit).round() / unit, values)


def best_bar(p: np.ndarray, gain: np.ndarray) -> float:
    """The bar above which the likeliest candidate is written: the sum of the gains above it is largest.

    p [M]: probability of each held-out number's likeliest candidate. gain [M]: by how much it is nearer than Y's
    location. 1 if those above gain less than `LEAST_GAIN` on average. 0 if less than a `TELLING`th part is below: a few
    numbers show little, and in a text the likeliest of several operands makes sense, Y's location does not. Without
    numbers 1/2.
    """
    if not len(p):
        return 0.5
    order = np.argsort(-p, kind="stable")
    p, total = p[order], np.cumsum(gain[order])
    total[:-1][p[:-1] == p[1:]] = -np.inf  # a bar cannot lie between equal ones
    best = int(np.argmax(total))
    if total[best] < LEAST_GAIN * (best + 1):
        return 1.0
    below = p[best + 1 :]
    return float((p[best] + below[0]) / 2) if len(below) * TELLING >= len(p) else 0.0
