"""Estimates the amount of training data from the first texts and proposes settings. Only chats need torch."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.schema import Config
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.encoder import NumberEncoder
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_train

MOST, COUNTED = 2000, 20_000  # texts to tokenise, and to count: more would not change a setting
_AROUND = 2  # tokens before and after the text
_BYTES = 3  # per token; a low estimate, so that nearly all texts fit
_STEPS = 100  # minimum per stage if there is enough text: fewer hardly move the heads
_EPOCHS = (2, 30)
_WARMUP = 20  # steps at most
_LENGTHS = (64, 2048)  # shortest and longest sequence_length
_TO_HOLD_OUT = 10  # texts: below this a tenth would be no text
_HELD_OUT = (64, 1 << 15)  # cap in texts and tokens: more makes evaluations slower, not more precise


class Amount(NamedTuple):
    """Approximate tokens per text; whether all texts were counted; the error that stopped the reading, if any."""

    lengths: list[int]  # for the first texts
    complete: bool
    error: UserError | None = None
    further: int = 0  # texts, only counted
    exact: bool = False  # the base's tokenizer counted

    @property
    def texts(self) -> int:
        return len(self.lengths) + self.further

    def words(self) -> str:
        """A line with the number of texts and their lengths."""
        n = self.texts
        count = f"{n:,}{'' if self.complete or self.error else ' or more'} text{'s' * (n != 1)}"
        return f"{count}, about {sorted(self.lengths)[len(self.lengths) // 2]:,} tokens in the median"

    def pieces(self, length: int) -> int:
        """Approximate number of sequences of at most `length` tokens; long texts are cut."""
        return round(sum(math.ceil(n / length) for n in self.lengths) * self.texts / max(len(self.lengths), 1))


class Suited(NamedTuple):
    """Proposed settings. steps: per stage, a lower bound if the amount is incomplete."""

    complete: bool
    length: int
    held_out: float
    batch: int
    epochs: int
    steps: int
    warmup: int
    every: int  # steps between evaluations

    def words(self) -> str:
        """A line with the settings."""
        at_least = "" if self.complete else "at least "
        return (
            f"{at_least}{self.steps} steps of {self.batch} in each stage ({self.epochs} epochs), {self.warmup} of them "
            f"warm-up; {self.length} tokens at most{'' if self.held_out else '; too few texts to hold some out'}"
        )


def amount_of(config: DataConfig, base: Path | None = None) -> Amount:
    """Look at the first `MOST` texts of data.train, and count them. base: a folder with a tokenizer, to count tokens
    and for its chat template; else tokens are estimated, and chats written as ChatML.

    A bad text ends the reading and `Amount` keeps the error. Raises `UserError` if the first text is bad.
    """
    texts: list[str] = []
    error, further = None, 0
    chat, encoder = _tools_of(config, base)
    try:
        every = read_train(config, ReadReport(), chat)
        texts.extend(text.text for text in islice(every, MOST))
        further = sum(1 for _ in islice(every, COUNTED - MOST))
    except UserError as met:
        if not texts:
            raise
        error = met
    if encoder is not None:
        lengths = [len(reading.ids) + _AROUND for reading in encoder.read(texts)]
    else:
        lengths = [math.ceil(len(text.encode(errors="replace")) / _BYTES) + _AROUND for text in texts]
    return Amount(lengths, error is None and further < COUNTED - MOST, error, further, encoder is not None)


def _tools_of(config: DataConfig, base: Path | None) -> tuple[Chat, NumberEncoder | None]:
    """What the base writes chats with, and encodes texts with; ChatML and None without a tokenizer there."""
    if base is None or not (base / "tokenizer.json").is_file():
        return Chat(), None
    policy = config.policy.model_copy(update={"digits": config.target_field is None})  # as `Config.policy` has it
    if config.messages_field is None:
        words = Tokenizer.from_file(str(base / "tokenizer.json"))
        return Chat(), NumberEncoder(words, words.get_vocab_size(), policy)
    from cqwen_dist.data.tokenizer import NumericalAwareTokenizer  # imports torch

    tokenizer = NumericalAwareTokenizer.from_pretrained(base, policy=policy, key="model.name_or_path")
    return Chat(tokenizer.tokenizer), tokenizer.encoder


def suited(amount: Amount, context: int | None, is_table: bool = False) -> Suited:
    """Propose settings. context: the base's maximum length in tokens; None: unknown. is_table: keep long rows whole."""
    most = sorted(amount.lengths)[min(len(amount.lengths) - 1, int(0.95 * len(amount.lengths)))]
    length = _LENGTHS[0]
    while length < min(most, context if is_table and context else _LENGTHS[1]):
        length *= 2
    length = min(length, context or length)
    texts, tokens = _HELD_OUT
    enough = max(texts, tokens * len(amount.lengths) / max(sum(amount.lengths), 1)) / max(amount.texts, 1)
    held_out = min(0.1, math.ceil(1000 * enough) / 1000) if amount.texts >= _TO_HOLD_OUT else 0.0
    pieces = max(1, round(amount.pieces(length) * (1.0 - held_out)))
    # A power of two with 16 steps in an epoch, if that is 4 to 32 texts.
    batch = min(2 ** max(int(math.log2(pieces / 16)) if pieces >= 16 else 0, 2), 32, 2 ** int(math.log2(pieces)))
    epoch = math.ceil(pieces / batch)
    epochs = min(max(math.ceil(_STEPS / epoch), _EPOCHS[0]), _EPOCHS[1])
    steps = epoch * epochs
    warmup, every = min(max(steps // 10, 1), _WARMUP), min(max(steps // 4, 5), 50)
    return Suited(amount.complete, length, held_out, batch, epochs, steps, warmup, every)


def cut_apart(amount: Amount, data: DataConfig, length: int) -> Iterator[str]:
    """A sentence if rows of a table have more than `length` tokens. Raises: UserError if all rows have."""
    if data.target_field is None or data.long_texts != "cut":
        return
    apart, of = sum(n - _AROUND > length for n in amount.lengths), len(amount.lengths)
    if apart == of and amount.exact and amount.complete and not amount.further:
        found = Said(f"only rows of more than {length:,} tokens, {min(amount.lengths):,} or more")
        allowed = "shorter ones, as a target without its columns teaches nothing: fewer columns, or a longer context"
        raise UserError("data.train", found, allowed, str(data.train))
    if apart:
        yield f"{apart:,} of {of:,} rows have more than {length:,} tokens: their target is cut away from their columns"


def never_warm(amount: Amount, config: Config) -> Iterator[str]:
    """A sentence for each stage that is all warm-up."""
    share = 1.0 if config.data.eval is not None else 1.0 - config.data.eval_fraction
    for index, (stage, (length, batch, _)) in enumerate(zip(config.stages, config.batch_shapes(), strict=True)):
        epoch = math.ceil(amount.pieces(length) * share / batch)
        steps = stage.steps or (round(stage.epochs * epoch) if stage.epochs and amount.complete else 0)
        if 0 < steps <= stage.warmup_steps:
            warm = f"stages.{index}.warmup_steps is {stage.warmup_steps}"
            yield f"stage {stage.name} has about {steps} steps, all of them warm-up: {warm}, lr is not reached"
