"""Reads arithmetic in a text: the value of the expression that ends at its last equals sign.

A reader sees symbols one after another and keeps a state of fixed size, so that training, generation and compiled steps
share it. It knows + - * /, one level of brackets, % and chains, with the usual precedence. Any other word ends the
expression, and if it cuts an operator off ("20 eggs * 40% ="), there is no value. Two numbers side by side begin a new
one, and so does an equals sign: "6 * 8 = 48 / 2 =" has the value 24.

Letters: B rows, T positions, N places, D numbers of a state.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cqwen_dist.config.shape import A_TOKEN, SIGNS

NO_SYMBOL, PLUS, MINUS, TIMES, OVER, OPEN, CLOSE, EQUALS, PERCENT, NUMBER, OTHER = range(11)
LONGEST = 24  # symbols that are read before a token; an expression has two fewer, without its equals sign
# A state: of the current bracket and of what is around it, the sum so far, the last summand, the operator that waits
# for a number, and the operations done (-1: no number yet); the depth; the value; the symbols since the last beginning.
STATE = 11
VALUE = 9  # its place in a state: NaN unless an expression has just ended


def symbol_table(symbols: Mapping[str, Sequence[int]], rows: int, num_token_id: int) -> Tensor:
    """The symbols of each token, [rows,A_TOKEN] int8, from the result of `config.bases.symbols_of`."""
    table = torch.full((rows, A_TOKEN), NO_SYMBOL, dtype=torch.int8, device="cpu")
    table[:, 0] = OTHER
    for signs, tokens in symbols.items():
        codes = [PLUS + SIGNS.index(sign) for sign in signs] + [NO_SYMBOL] * (A_TOKEN - len(signs))
        table[list(tokens)] = torch.tensor(codes, dtype=torch.int8, device="cpu")
    table[num_token_id] = torch.tensor([NUMBER, NO_SYMBOL], dtype=torch.int8, device="cpu")
    return table


def at_beginning(count: int, device: torch.device) -> Tensor:
    """The states [count,STATE] float64 of texts that begin."""
    state = torch.zeros(count, STATE, dtype=torch.float64, device=device)
    state[:, [3, 7]] = -1.0
    state[:, VALUE] = torch.nan
    return state


def read_symbol(state: Tensor, symbol: Tensor, value: Tensor) -> Tensor:
    """The states [N,STATE] after one more symbol [N]; value [N] float64: of a number."""
    total, last, waiting, done, total_out, last_out, waiting_out, done_out, depth, found, since = state.unbind(-1)
    inside, complete = depth > 0, (done >= 0) & (waiting == 0)

    # A bracket that closes is a number of what is around it
    closes = (symbol == CLOSE) & inside & complete
    within, steps_within = total + last, done
    total, last, waiting, done = (
        torch.where(closes, out, own)
        for out, own in ((total_out, total), (last_out, last), (waiting_out, waiting), (done_out, done))
    )

    # A number ends the operation that waits, or begins an expression
    number, value = (symbol == NUMBER) | closes, torch.where(closes, within, value)
    alone, sums = waiting == 0, (waiting == PLUS) | (waiting == MINUS)
    new_total = torch.where(sums, total + last, torch.where(alone, 0.0, total))
    product = torch.where(waiting == TIMES, last * value, torch.where(waiting == OVER, last / value, value))
    new_done = torch.where(alone, 0.0, done + 1).maximum(torch.where(closes, steps_within, 0.0))
    new_last = torch.where(waiting == MINUS, -value, product)
    total, last = torch.where(number, new_total, total), torch.where(number, new_last, last)
    done, waiting = torch.where(number, new_done, done), torch.where(number, 0.0, waiting)

    # Signs
    sign = (symbol >= PLUS) & (symbol <= OVER)
    operator = sign & (done >= 0) & (waiting == 0)
    percent = (symbol == PERCENT) & complete
    waiting = torch.where(operator, symbol.double(), waiting)
    last, done = torch.where(percent, last / 100, last), done + percent
    opens = (symbol == OPEN) & ~inside
    around = torch.where((waiting == 0) & (done >= 0), float(TIMES), waiting)  # 2 (3 + 4) is a product
    total_out, last_out, done_out = (
        torch.where(opens, own, out) for own, out in ((total, total_out), (last, last_out), (done, done_out))
    )
    waiting_out = torch.where(opens, around, waiting_out)

    # The value, and where an expression begins anew
    ends = symbol == EQUALS
    valid = ends & ~inside & complete & (done > 0) & (since <= LONGEST - 2)
    signed = (symbol == MINUS) & (found < 0)  # "3 - 5 = -": the value's size is still to come
    after = torch.where(valid, total + last, torch.where(signed, -found, torch.nan))
    found = torch.where(symbol == NO_SYMBOL, found, after)
    broken = ((symbol == CLOSE) & inside & ~closes) | ((symbol == OPEN) & inside)
    # Operators that a word has cut off, as in "20 eggs * 40% =" and "2x - 5 ="; a first + or - may be a bullet
    broken = broken | (sign & ~operator & ((symbol >= TIMES) | (since > 0)))
    anew = ends | broken | (symbol == OTHER)
    empty = anew | opens
    total, last, waiting = (torch.where(empty, 0.0, own) for own in (total, last, waiting))
    done = torch.where(empty, -1.0, done)
    depth = torch.where(anew | closes, 0.0, torch.where(opens, 1.0, depth))
    since = torch.where(anew, 0.0, since + (symbol != NO_SYMBOL)).masked_fill(broken, torch.inf)  # up to the next "="
    parts = (total, last, waiting, done, total_out, last_out, waiting_out, done_out, depth, found, since)
    return torch.stack(parts, -1)


def read_tokens(state: Tensor, symbols: Tensor, values: Tensor) -> Tensor:
    """The states [N,STATE] after one more token each: symbols [N,A_TOKEN], values [N] float64."""
    for symbol in symbols.unbind(-1):
        state = read_symbol(state, symbol, values)
    return state


def states_at(symbols: Tensor, values: Tensor, positions: Tensor, at: Tensor) -> Tensor:
    """The states [N,STATE] after the tokens `at` [N] (indices into the flat batch).

    symbols [B,T,A_TOKEN]; values [B,T] float64; positions [B,T]: 0 where a text begins. Only the last `LONGEST` symbols
    before a token are read, since an older one cannot be part of a valid expression.
    """
    flat = symbols.flatten()
    place = nn.functional.pad((flat != NO_SYMBOL).nonzero()[:, 0], (0, 1))  # of every symbol, in order
    read = (symbols != NO_SYMBOL).sum(-1).flatten().cumsum(0)  # up to and including each token
    tokens = torch.arange(positions.numel(), device=positions.device)
    begins = tokens - positions.flatten()
    first = torch.where(begins > 0, read[(begins - 1).clamp(min=0)], 0)  # of each token's text
    end, first = read[at], first[at]
    state = at_beginning(len(at), values.device)
    state[:, -1] = torch.where(end - first > LONGEST, torch.inf, 0.0)  # it begins in the middle of something
    for back in range(LONGEST, 0, -1):
        index = end - back
        here = place[index.clamp(min=0)]
        symbol = torch.where(index >= first, flat[here], NO_SYMBOL)
        state = read_symbol(state, symbol, values.flatten()[torch.div(here, A_TOKEN, rounding_mode="floor")])
    return state
