"""The wide part: a linear prediction of the next number from the words and numbers so far (Cheng et al. 2016, "Wide &
Deep Learning", arXiv 1606.07792).

z of a frozen base contains little about earlier words and hardly any values. The wide part is a ridge regression on the
words and values directly. At position i of a text it adds to the location that the deep part infers from z

    g_i = sum over j <= i: w[each n-gram that ends at j] + w[the line, if j ends one]
          + q_i, from the named numbers (`NamedNumbers`)
          + a linear function of the states of the base's layers, here and in the mean so far, if it reads them

and to the log scale an h_i of the same form, with separate weights: some texts determine their number better than
others. In a table's prompt a line is `column: cell`, so it acts as a category. In n-grams and lines a number counts as
its value, to four digits. Both are hashed into columns of a table w (Weinberger et al. 2009), which is fitted in closed
form at the start (`wide_start`) and never trained.

There are FOLDS tables of each kind. Each text so far belongs to one fold, by hash. In training mode it is read with the
table fitted without that fold, so later layers train on out-of-fold residuals. In eval mode the mean of all tables is
used.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cqwen_dist.heads.beside import Beside
from cqwen_dist.model.depths import since
from cqwen_dist.model.embedding import phi
from cqwen_dist.tables.wide.wide_size import FOLDS, KINDS, NAMES

GRAMS = 3  # n-grams of 1, 2 and 3 tokens
MOST = 2.0  # bound on |h|: new words and values must not make a number certain, or all numbers possible
_NOTHING, _NUMERAL = -1, -2  # the symbol before a text; in names, of every number
_MULTIPLIER, _INCREMENT = -7046029254386353131, 1442695040888963407  # odd; from splitmix64 and PCG


class Entries(NamedTuple):
    """Increments at each position. A negative `begin`: its text begins before these tokens."""

    columns: Tensor  # [B,T,GRAMS+1] of the tables: n-grams, the line
    counts: Tensor  # [B,T,GRAMS+1] 1: this n-gram or line ends here
    name: Tensor  # [B,T] key of a number's name
    phi: Tensor  # [B,T] of a number's value
    value: Tensor  # [B,T] the value itself, float64
    number: Tensor  # [B,T] 1 at numbers
    symbols: Tensor  # [B,GRAMS-1+T] those before these tokens too
    text: Tensor  # [B,T] hash of the text up to here
    line: Tensor  # [B,T] hash of the line up to here
    words: Tensor  # [B,T] the same without the values of numbers
    begin: Tensor  # [B,T] where its text begins


class WideState(NamedTuple):
    """State of the text so far, for the tokens that follow."""

    symbols: Tensor  # [B,GRAMS-1] the last ones
    sums: Tensor  # [KINDS * FOLDS,B]
    hash: Tensor  # [B] of the text
    line: Tensor  # [B] hash of the line that has not ended
    words: Tensor  # [B] the same without the values of numbers
    numbers: Tensor  # [2*NAMES,B] by name


class WidePart(Beside):
    """`Beside` by tables. All are 0 until the start is calibrated: g = h = 0."""

    layers: Tensor | None

    def __init__(
        self,
        columns: int,
        num_token_id: int,
        vocab_size: int,
        random_features: int = 0,
        depths: int = 0,
        hidden_size: int = 0,
    ) -> None:
        """columns: of each table. random_features: 0 for none. depths: how many of the base's layers it reads
        (`model.depths`), 0 for none. hidden_size: H of these layers."""
        super().__init__()
        self.num_token_id = num_token_id
        self.weight = nn.Parameter(torch.zeros(KINDS * FOLDS, columns), requires_grad=False)
        self.line_end = nn.Parameter(torch.zeros(vocab_size), requires_grad=False)  # 1: the token ends a line
        self.numbers, self.hidden_size = NamedNumbers(KINDS * FOLDS, random_features), hidden_size
        self.reads = max(2 * depths - 1, 0) * hidden_size
        with_intercept = 2 * depths * hidden_size + 1
        self.register_parameter("layers", _constant(KINDS * FOLDS, with_intercept) if depths else None)

    @classmethod
    def of(cls, config: Any) -> "WidePart":
        """The part that a `CausalQwenConfig` asks for."""
        sizes = config.vocab_size, config.random_features, config.depths, config.hidden_size
        return cls(config.wide, config.num_token_id, *sizes)

    def begin(self, line_ends: Sequence[int]) -> None:
        """Prepare for a vocabulary: which tokens end a line."""
        self.line_end.data[list(line_ends)] = 1.0

    def forward(
        self,
        ids: Tensor,
        values: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        state: WideState | None = None,
        keep: Tensor | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, WideState]:
        """ids [B,T], values [B,T] (raw unit, 0 at text) -> g and h [2,B,T] fp32, and the state after them.

        positions [B,T]: a text begins where they are 0 (default: at the first token, or with `state` before it).
        mask [B, T or more]: 0 at padding; the last T count. keep [N], indices into B*T: only g and h of these, [2,N].
        states [B,T,2*depths*H], or with keep [N,...]: of the base's layers (`model.depths`), if it reads them.
        """
        found = self.entries(ids, values, positions, mask, state)
        own = (self.weight[:, found.columns] * found.counts).sum(-1).double()
        sums = since(own, found.begin, None if state is None else state.sums)
        own = self.numbers.read(found.name, found.phi, found.value, found.number)
        numbers = since(own, found.begin, None if state is None else state.numbers)
        line, words = (part[:, -1] * (self.line_end[ids[:, -1]] == 0) for part in (found.line, found.words))
        last = found.symbols[:, 1 - GRAMS :]
        behind = WideState(last, sums[..., -1], found.text[:, -1], line, words, numbers[..., -1])
        fold = fold_of(found.text)
        if keep is not None:  # the random features are the most expensive part
            sums, numbers, fold = (part.flatten(-2)[..., keep] for part in (sums, numbers, fold))
        sums = sums + self.numbers(numbers)
        if self.layers is not None and states is not None:
            table = self.layers.float()
            sums = sums + F.linear(states.float(), table[:, :-1], table[:, -1]).movedim(-1, 0)
        sums = sums.unflatten(0, (KINDS, FOLDS))
        g, h = sums.gather(1, fold.expand(KINDS, 1, *fold.shape))[:, 0] if self.training else sums.mean(1)
        return torch.stack([g, h.clamp(-MOST, MOST)]).float(), behind

    def entries(
        self,
        ids: Tensor,
        values: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        state: WideState | None = None,
    ) -> Entries:
        """As `forward` takes them."""
        is_number = ids == self.num_token_id
        # Equal for values that agree in their first 14 bits: rounding must not turn a number into a different word
        numerals = (values.float().view(torch.int32) + 512) >> 10
        symbols = torch.where(is_number, _mixed(numerals.long()), ids)
        real = torch.ones_like(is_number) if mask is None else mask[:, -ids.shape[1] :].bool()
        symbols = symbols.where(real, _NOTHING)

        # The start of each position's text
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = at == (0 if state is None else -1) if positions is None else positions == 0
        begin = torch.where(begins, at, -GRAMS).cummax(1).values

        # n-grams, each hashed from the one that is one token shorter
        earlier = symbols.new_full((len(symbols), GRAMS - 1), _NOTHING) if state is None else state.symbols
        extended = torch.cat([earlier, symbols], 1)
        width = symbols.shape[1]
        before = [
            extended[:, GRAMS - 1 - n : GRAMS - 1 - n + width].where(at - begin >= n, _NOTHING) for n in range(GRAMS)
        ]
        hashes = _hashes(before)

        # Lines, by the sum of their tokens' 2-grams
        ends = (self.line_end[ids] != 0) & real
        line_begin = torch.where(F.pad(ends, (1, 0))[:, :-1], at, begin).cummax(1).values
        line = since(hashes[1] * real, line_begin, None if state is None else state.line)
        text = since(hashes[-1] * real, begin, None if state is None else state.hash)

        # The line before a number is its name. Other numbers in it count as one symbol, or no name would recur
        plain = [x.where((x >= _NOTHING) & (x < len(self.line_end)), _NUMERAL) for x in before[:2]]
        pairs = _hashes(plain)[1] * real
        words = since(pairs, line_begin, None if state is None else state.words)
        name = _mixed(words - pairs) % KEYS

        first_line = lines_begin(self.weight.shape[1])
        lines = first_line + _mixed(line) % (self.weight.shape[1] - first_line)
        columns = torch.stack([*(h % first_line for h in hashes), lines], -1)
        number = (is_number & real).float()
        counts = torch.stack([real.float()] * GRAMS + [ends.float()], -1)
        of_numbers = name, phi(values) * number, values.double() * number, number
        return Entries(columns, counts, *of_numbers, extended, text, line, words, begin)


def lines_begin(columns: int) -> int:
    """The first column of lines in the table; n-grams come before it."""
    return columns * 3 // 4


def fold_of(text: Tensor) -> Tensor:
    """The fold, in [0, FOLDS), from the sum of the hashes of a text's positions."""
    return (_mixed(text) >> 40) % FOLDS


def _hashes(before: Sequence[Tensor]) -> list[Tensor]:
    """Of the n-grams that end at each symbol, n = 1, 2 and so on. before: the symbols, those one earlier, and so on."""
    hashes = [_mixed(before[0])]
    for symbol in before[1:]:
        hashes.append(_mixed(hashes[-1] + _mixed(symbol)))
    return hashes


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64, which wraps round."""
    x = (x + _INCREMENT) * _MULTIPLIER
    x = (x ^ (x >> 32)) * _MULTIPLIER
    return x ^ (x >> 29)


FAR = 4.0  # clip, in standard deviations: one year 0 among years near 2000 must not decide the fit
KEYS = 2**24  # hashes of names
_BOUND = 1e6  # bound of one number's x: sums over a text stay finite
_BYTES = (65536, 256, 1)
_AT_ONCE = 256  # features whose cosines are in memory for all positions at once


class NamedNumbers(nn.Module):
    """q of the numbers so far, for each of `tables` weight sets: linear in the named numbers, and jointly by a kernel.

        q = sum over names k: v_k x_k + v'_k x'_k  +  sum over d: V_d cos(offset_d + sum over k: x_k frequency_kd)
        x_k = slope_k (phi(value_k) - centre_k),  x'_k = slope'_k (value_k - centre'_k),  at most FAR each

    The raw values x' are for sums: a total is linear in its parts, not in their logarithms. A number's name is the text
    before it in its line, whatever the values of numbers in it. Rare names do not count. If a text lacks a name,
    x_k = x'_k = 0, as at the mean. The random Fourier features turn the ridge regression into a kernel regression
    (Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines"). All parameters are 0, and q = 0, until
    the calibrated start sets them.
    """

    frequencies: Tensor | None
    offsets: Tensor | None
    weight: Tensor | None

    def __init__(self, tables: int, random_features: int) -> None:
        """random_features: 0 for the linear terms only."""
        super().__init__()
        self.names = _constant(NAMES, len(_BYTES))  # bytes of a name's key: exact in any dtype
        self.centre, self.slope = _constant(2, NAMES), _constant(2, NAMES)  # of phi, of values
        self.linear = _constant(tables, 2 * NAMES)
        random = {"frequencies": (NAMES, random_features), "offsets": (random_features,)}
        for name, shape in (random | {"weight": (tables, random_features)}).items():
            self.register_parameter(name, _constant(*shape) if random_features else None)

    def read(self, name: Tensor, phi: Tensor, value: Tensor, number: Tensor) -> Tensor:
        """The increment of x and x' at each position: [2*NAMES,B,T] float64.

        name [B,T]: key of a number's name. phi, value [B,T]: at numbers, 0 elsewhere. number [B,T]: 1 at numbers.
        """
        known = (self.names.long() * torch.tensor(_BYTES, device=name.device)).sum(-1)
        both = torch.stack([phi.double(), value.double()])[:, None]
        x = (both - self.centre[..., None, None] * number) * self.slope[..., None, None]
        return ((name == known[:, None, None]) * x.clamp(-_BOUND, _BOUND)).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x, x' [2*NAMES,...] of the numbers so far, before clipping -> q [tables,...] fp32."""
        x = x.float().clamp(-FAR, FAR)
        q = torch.tensordot(self.linear.float(), x, 1)
        if self.frequencies is None or self.offsets is None or self.weight is None:
            return q
        parts = (table.split(_AT_ONCE, -1) for table in (self.frequencies, self.offsets, self.weight))
        for frequencies, offsets, weight in zip(*parts, strict=True):
            phase = torch.tensordot(frequencies.float().T, x[:NAMES], 1) + offsets.view(-1, *[1] * (x.dim() - 1))
            q = q + torch.tensordot(weight.float(), phase.cos(), 1)
        return q


def bytes_of(keys: Tensor) -> Tensor:
    """[n] below KEYS -> [n,3], as in `NamedNumbers.names`."""
    return torch.stack([keys // size % 256 for size in _BYTES], -1).float()


def _constant(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)
