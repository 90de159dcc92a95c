"""How much there is to learn from, and settings that suit it. Reads the first texts, and no torch."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import UserError
from cqwen_dist.config.schema import Config
from cqwen_dist.data.encoder import NumberEncoder, split
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_train

MOST, COUNTED = 2000, 20_000  # texts to look at, and to count: more of them change no setting
_BYTES = 3  # of a token, a low estimate, so that nearly all texts fit
_STEPS = 100  # of a stage, at least, where few texts allow it: fewer move the heads little
_EPOCHS = (2, 30)
_WARMUP = 20  # steps at most
_LENGTHS = (64, 2048)  # shortest and longest sequence_length
_TO_HOLD_OUT = 10  # texts: a tenth of fewer is none
_HELD_OUT = (64, 1 << 15)  # texts and tokens: where a tenth has more, they cost evaluations much and tell little more
_NUMBERS, _READ = 2000, 1 << 16  # numbers that the start is fitted to, and tokens that it reads for them, at most


class Amount(NamedTuple):
    """The tokens of each text, about; whether all texts are counted; what stopped the reading, if anything did."""

    lengths: list[int]  # of the first texts
    complete: bool
    error: UserError | None = None
    numbers: int = 0  # in these texts
    further: int = 0  # texts, only counted

    @property
    def texts(self) -> int:
        return len(self.lengths) + self.further

    def words(self) -> str:
        """How many texts of what length."""
        n = self.texts
        count = f"{n:,}{'' if self.complete or self.error else ' or more'} text{'s' * (n != 1)}"
        return f"{count}, about {sorted(self.lengths)[len(self.lengths) // 2]:,} tokens in the median"

    def pieces(self, length: int) -> int:
        """Sequences of at most `length` tokens, about: long texts are cut."""
        return round(sum(math.ceil(n / length) for n in self.lengths) * self.texts / max(len(self.lengths), 1))

    def to_hold_out(self) -> float:
        """Share of the texts to hold out."""
        texts, tokens = _HELD_OUT
        enough = max(texts, tokens * len(self.lengths) / max(sum(self.lengths), 1)) / max(self.texts, 1)
        return min(0.1, math.ceil(1000 * enough) / 1000) if self.texts >= _TO_HOLD_OUT else 0.0


class Suited(NamedTuple):
    """Settings that suit an amount. steps: of a stage, at least if the amount is not complete."""

    complete: bool
    length: int
    held_out: float
    batch: int
    epochs: int
    steps: int
    warmup: int
    every: int  # steps between evaluations
    start_numbers: int

    def words(self) -> str:
        """What was chosen."""
        at_least = "" if self.complete else "at least "
        return (
            f"{at_least}{self.steps} steps of {self.batch} in each stage ({self.epochs} epochs), {self.warmup} of them "
            f"warm-up; {self.length} tokens at most{'' if self.held_out else '; too few texts to hold some out'}"
        )


def amount_of(config: DataConfig, base: Path | None = None) -> Amount:
    """Look at the first `MOST` texts of data.train, and count them. base: a folder with a tokenizer, to count tokens;
    else estimated.

    An error in a text ends the look; `Amount` has it. Raises `UserError` if it is in the first.
    """
    texts: list[str] = []
    error, further = None, 0
    try:
        every = read_train(config, ReadReport())
        texts.extend(text.text for text in islice(every, MOST))
        further = sum(1 for _ in islice(every, COUNTED - MOST))
    except UserError as met:
        if not texts:
            raise
        error = met
    file = None if base is None else base / "tokenizer.json"
    if file is not None and file.is_file():
        words = Tokenizer.from_file(str(file))
        read = NumberEncoder(words, words.get_vocab_size(), config.numbers).read(texts)
        lengths = [len(reading.ids) + 2 for reading in read]  # tokens before and after the text
        numbers = sum(len(reading.numbers) for reading in read)
    else:
        lengths = [math.ceil(len(text.encode(errors="replace")) / _BYTES) + 2 for text in texts]
        numbers = sum(len(split(text, config.numbers)[1]) for text in texts)
    return Amount(lengths, error is None and further < COUNTED - MOST, error, numbers, further)


def suited(amount: Amount, context: int | None) -> Suited:
    """Settings with which a run learns. context: tokens that the base reads; None: unknown."""
    most = sorted(amount.lengths)[min(len(amount.lengths) - 1, int(0.95 * len(amount.lengths)))]
    length = _LENGTHS[0]
    while length < min(most, _LENGTHS[1]):
        length *= 2
    length = min(length, context or length)
    held_out = amount.to_hold_out()
    pieces = max(1, round(amount.pieces(length) * (1.0 - held_out)))
    # A power of two with 16 steps in an epoch, where that is 4 to 32 texts.
    batch = min(2 ** max(int(math.log2(pieces / 16)) if pieces >= 16 else 0, 2), 32, 2 ** int(math.log2(pieces)))
    epoch = math.ceil(pieces / batch)
    epochs = min(max(math.ceil(_STEPS / epoch), _EPOCHS[0]), _EPOCHS[1])
    steps = epoch * epochs
    warmup, every = min(max(steps // 10, 1), _WARMUP), min(max(steps // 4, 5), 50)
    start_numbers = min(_NUMBERS, round(amount.numbers / max(sum(amount.lengths), 1) * _READ))
    return Suited(amount.complete, length, held_out, batch, epochs, steps, warmup, every, start_numbers)


def never_warm(amount: Amount, config: Config) -> list[str]:
    """Stages of which every step is warm-up, in words."""
    found = []
    share = 1.0 if config.data.eval is not None else 1.0 - config.data.eval_fraction
    for index, (stage, (length, batch, _)) in enumerate(zip(config.stages, config.batch_shapes(), strict=True)):
        epoch = math.ceil(amount.pieces(length) * share / batch)
        steps = stage.steps or (round(stage.epochs * epoch) if stage.epochs and amount.complete else 0)
        if 0 < steps <= stage.warmup_steps:
            warm = f"stages.{index}.warmup_steps is {stage.warmup_steps}"
            found.append(f"stage {stage.name} has about {steps} steps, all of them warm-up: {warm}, lr is not reached")
    return found
