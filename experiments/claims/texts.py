"""The texts of the experiments: a share of the user's texts for each seed, and five kinds of texts that are none of
these.

The user's texts, prose and code are those of `experiments.learn.corpora`. Two kinds are made here: the held-out texts
with their words in random order, and short problems in other languages, which were written for this purpose.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from experiments.learn.corpora import Item, read_items, write_corpora

LANGUAGES = (
    "Anna kauft drei Äpfel für je zwei Euro und bezahlt mit einem Zehner. Wie viel Geld bekommt sie zurück? Sie "
    "bezahlt sechs Euro und bekommt vier Euro zurück.",
    "Ein Bauer hat 24 Kühe und verkauft die Hälfte davon. Danach kauft er 5 neue. Wie viele Kühe hat er jetzt? Er"
    " behält 12 Kühe und hat am Ende 17.",
    "Der Zug fährt in einer Stunde 80 Kilometer. Wie weit kommt er in drei Stunden? In drei Stunden legt der Zug "
    "240 Kilometer zurück.",
    "Pierre a 15 billes et en donne 6 à sa sœur. Combien de billes lui reste-t-il ? Il lui reste 9 billes, car "
    "quinze moins six font neuf.",
    "Une boulangerie vend 40 pains le matin et 25 pains le soir. Combien de pains vend-elle par jour ? Elle vend "
    "65 pains chaque jour de la semaine.",
    "Le jardinier plante 8 rangées de 7 tulipes. Combien de tulipes plante-t-il en tout ? Il en plante 56, et la "
    "moitié d'entre elles sont rouges.",
    "María tiene 20 euros y compra dos libros de 7 euros cada uno. ¿Cuánto dinero le queda? Los libros cuestan 14"
    " euros y le quedan 6.",
    "En una clase hay 30 alumnos y un tercio de ellos lleva gafas. ¿Cuántos alumnos no llevan gafas? Diez llevan "
    "gafas y veinte no las llevan.",
    "Un coche gasta 6 litros de gasolina en 100 kilómetros. ¿Cuántos litros gasta en 250 kilómetros? Gasta 15 "
    "litros en todo el viaje.",
    "小明有12个苹果，他送给小红5个，又买了3个。小明现在有多少个苹果？他先剩下7个，后来一共有10个苹果。",
    "一本书有120页，小华每天读15页。他读完这本书要多少天？一百二十除以十五等于八，所以他需要8天。",
    "商店里一支铅笔2元，一个本子5元。妈妈买了4支铅笔和2个本子，一共花了多少钱？铅笔8元，本子10元，一共18元。",
)
KINDS = ("prose", "code", "shuffled words", "other languages")


class Sizes(NamedTuple):
    """How much is read and trained; the counts of texts are of one seed."""

    texts: int  # to calibrate and to train on
    held_out: int
    pieces: int  # of each of `KINDS`
    calibration: int  # tokens that the start is fitted to
    steps: int  # of training the heads
    step_tokens: int
    grid_steps: int  # of each point of `grid`
    individuals: int
    prompts: int
    words: int  # that an individual writes
    lora_heads: int  # steps of a training with LoRA: of the heads first,
    lora_steps: int  # then of both
    lora_texts: int  # of a step
    people: int  # of `treatments`, to learn from
    asked: int  # others, to ask for
    minutes: float  # that `cqwen fit` may take for a seed


SIZES = {
    "small": Sizes(
        30,
        16,
        6,
        calibration=3072,
        steps=100,
        step_tokens=80,
        grid_steps=40,
        individuals=8,
        prompts=6,
        words=10,
        lora_heads=6,
        lora_steps=12,
        lora_texts=2,
        people=400,
        asked=100,
        minutes=2.0,
    ),
    "full": Sizes(
        1500,
        200,
        40,
        calibration=4096,
        steps=1000,
        step_tokens=4096,
        grid_steps=300,
        individuals=64,
        prompts=32,
        words=48,
        lora_heads=100,
        lora_steps=300,
        lora_texts=16,
        people=4000,
        asked=500,
        minutes=20.0,
    ),
}


def texts_of(folder: Path, data: str, size: Sizes, seed: int, seeds: int) -> dict[str, list[str]]:
    """The texts of one seed out of `seeds`: "train", "held out" and each of `KINDS`. No two seeds share a text, but for
    the other languages, which are few. Raises `UserError`."""
    found = {name: [item.text for item in items] for name, items in items_of(folder, data, size, seed, seeds).items()}
    held_out = found["words"]
    languages = list(LANGUAGES)
    random.Random(seed).shuffle(languages)
    return {
        "train": found["train"],
        "held out": held_out,
        "prose": found["prose"],
        "code": found["code"],
        "shuffled words": [shuffled(text, seed) for text in held_out[: size.pieces]],
        "other languages": languages[: size.pieces],
    }


def items_of(folder: Path, data: str, size: Sizes, seed: int, seeds: int) -> dict[str, list[Item]]:
    """The seed's texts with their prompts: "train", and each of `HELD_OUT`. Raises `UserError`."""
    every = size.held_out * seeds
    write_corpora(folder, data, size.texts * seeds, every, every, size.pieces * seeds)
    counts = {"train": size.texts, "words": size.held_out, "prose": size.pieces, "code": size.pieces}
    return {name: read_items(folder / f"{name}.jsonl")[seed::seeds][:count] for name, count in counts.items()}


def shuffled(text: str, seed: int) -> str:
    """The text with its words in random order."""
    words = text.split()
    random.Random(f"{seed} {text}").shuffle(words)
    return " ".join(words)
