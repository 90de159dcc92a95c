"""Does an individual keep its manner, and better than sampling that keeps its noise? (S3 7.1: sampling the cause.)

N writers continue M prompts of different subjects (`writers` has the ways). Is a text nearer in its words to a text of
the same writer after another prompt than to one of another writer? AUROC over pairs, 0.5 is chance; and the share of
writers that a logistic regression names, trained on half of the prompts, asked on the others; chance is 1 / N. The
individuals are the model's default; the other ways are set to the diversity of ordinary sampling. A number counts as
<NUM>, its value unseen. Quality: the texts' surprise under the base's softmax, and distinct pairs of words. Before all
that: at positions of held-out texts, how many different words do 16 individuals choose, and 16 draws of softmax?
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from benchmarks.line_chart import line_chart
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.generation_settings import Settings
from cqwen_dist.generate.modes import MODES, Options
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.run.files import write_atomically
from experiments.claims.measures import Claim, auroc, cell
from experiments.claims.subject import Ask, calibrated, read
from experiments.claims.texts import Sizes, texts_of
from experiments.claims.writers import Texts, Way, diversity, matched, write

TITLE = "Individuals"
PROMPTS = (
    "Once upon a time there was",
    "The weather this week has been",
    "The best way to cook rice is",
    "When I was a child, I used to",
    "The history of the city begins",
    "My friend and I went to the market and",
    "The main reason why people travel is",
    "In the garden behind the house",
    "The teacher told the class that",
    "A good book should",
    "Last night the football team",
    "The doctor looked at the patient and said",
)
DRAWN, AT = 16, 128  # individuals at a position; positions
PILOT_WORDS, PILOT_PROMPTS = 8, 2
OWN, ORDINARY = "individual", "ordinary sampling"
WAYS = {
    "individual, tails uncut, matched": (Way("individual", 1.0), (1.0, 1e6)),
    "nucleus of 0.9, matched": (Way("fresh", 1.0, nucleus=0.9), (0.3, 10.0)),
    "Gumbel noise replayed, matched": (Way("replayed", 1.0), (0.05, 5.0)),
    "Gumbel noise constant, matched": (Way("constant", 1.0), (0.05, 5.0)),
}
TEMPERATURES = "temperatures.json"
FREE = {OWN: Way("individual", None), ORDINARY: Way("fresh", 1.0)}


def bags(ids: np.ndarray) -> np.ndarray:
    """Word counts weighted by rarity, of length 1: ids [M,N,T] -> [M,N,W]."""
    prompts, writers, _ = ids.shape
    texts = [" ".join(map(str, text)) for text in ids.reshape(prompts * writers, -1)]
    found = TfidfVectorizer(token_pattern=r"\S+").fit_transform(texts).toarray()
    return found.reshape(prompts, writers, -1)


def same_writer(x: np.ndarray) -> float:
    """AUROC of "by the same writer" by the nearness of two texts after different prompts, x [M,N,W]: the mean over
    pairs of prompts, so that it makes no difference which prompts are alike."""
    prompts, writers, _ = x.shape
    own = np.eye(writers, dtype=bool).flatten()
    pairs = [(p, q) for p in range(prompts) for q in range(p)]
    return float(np.mean([auroc((x[p] @ x[q].T).flatten(), own) for p, q in pairs]))


def named(x: np.ndarray, seed: int) -> float:
    """The share of texts whose writer a logistic regression names: trained on half of the prompts, asked on the
    rest."""
    prompts, writers, width = x.shape
    order = np.random.default_rng(seed).permutation(prompts)
    known, asked = order[: prompts // 2], order[prompts // 2 :]
    labels = np.arange(writers)
    model = LogisticRegression(C=10.0, max_iter=300)
    model.fit(x[known].reshape(-1, width), np.tile(labels, len(known)))
    return float(model.score(x[asked].reshape(-1, width), np.tile(labels, len(asked))))


@torch.no_grad()
def different_words(model: CausalQwenModel, texts: list[str], tokenizer: NumericalAwareTokenizer, seed: int) -> Any:
    """How many different words individuals choose at positions of texts, at the model's word temperature and at 1, and
    as many draws of softmax; the largest difference of their numbers between the two temperatures."""
    action, used = model.action, model.config.used_rows
    z = read(model, texts, tokenizer).z
    z = z[torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:AT]]
    mode, known = MODES["individual"], Intervals.from_dict(model.config.calibration)
    u, moved, counts = model.abduction(z), 0.0, dict[Any, float]({"auto": 0.0, 1.0: 0.0})
    p = action.word_head(used).loc(action.word_part(u))[:, :used].double().softmax(1)
    for i in range(len(z)):
        law = Cauchy(*(part[i].expand(DRAWN, -1) for part in u))
        numbers = []
        for wide in counts:
            draws = Settings(mode="individual", seed=seed * AT + i, word_temperature=wide).draws(z.device, known)
            laws = mode.law(action, law, draws)
            best = mode.choose(action, action.word_part(laws.words), draws, Options(used), z)
            counts[wide] += len(best.unique()) / len(z)
            numbers.append(action.number_head.value(laws.numbers).loc)
        moved = max(moved, float((numbers[0] - numbers[1]).abs().max()))
    softmax = float(-torch.expm1(DRAWN * torch.log1p(-p.clamp(max=1 - 1e-12))).sum(1).mean())
    return {"default": counts["auto"], "temperature 1": counts[1.0], "softmax": softmax, "numbers moved": moved}


def described(texts: Texts, seed: int) -> dict[str, float]:
    """All measures of one way."""
    ids = texts.ids.numpy()
    x = bags(ids)
    pairs = [(a, b) for text in ids.reshape(-1, ids.shape[-1]) for a, b in itertools.pairwise(text)]
    return {
        "diversity": diversity(texts.ids),
        "same writer": same_writer(x),
        "writer named": named(x, seed),
        "surprise": float(texts.surprise.median()),
        "distinct pairs": len(set(pairs)) / len(pairs),
    }


def of_seeds(asks: list[Ask]) -> list[dict[str, Any]]:
    """The measures of every way, of each seed; a seed's are read again where they were made before.

    A seed draws the writers. All have one start, and temperatures that the first seed's writers match.

    Raises `UserError`.
    """
    ask, size, say = asks[0], asks[0].size, asks[0].say
    folder = folder_of(ask)
    paths = [folder / f"seed-{one.seed}.json" for one in asks]
    if any(not path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        say("the start, from the user's texts and prose")
        model, tokenizer = start_of(ask)
        prompts = list(PROMPTS[: size.prompts])
        held_out = texts_of(ask.out / "data", ask.data, size, 0, ask.seeds)["held out"]
        ways = {**FREE, **_matched_ways(folder / TEMPERATURES, model.model, tokenizer, prompts, size, say)}
        for seed, path in enumerate(paths):
            if path.is_file():
                continue
            found = {}
            for name, way in ways.items():
                say(f"seed {seed}: {name}, temperature {way.temperature or 'auto'}")
                written = write(model.model, tokenizer, prompts, way, size.individuals, size.words, seed)
                example = [tokenizer.tokenizer.decode(text.tolist()) for text in written.ids[0, :3]]
                wide = way.temperature or Intervals.from_dict(model.config.calibration).word_temperature
                found[name] = {"temperature": wide, **described(written, seed), "examples": example}
            found[OWN]["words"] = different_words(model.model, held_out, tokenizer, seed)
            write_atomically(path, json.dumps(found, indent=1))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def folder_of(ask: Ask) -> Path:
    """Where the writers' measures are kept. The start depends on how many seeds share the texts."""
    return ask.out / "individuals" / f"of-{ask.seeds}"


def start_of(ask: Ask) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """The writers' model, the same for all seeds. Raises `UserError`."""
    texts = texts_of(ask.out / "data", ask.data, ask.size, 0, ask.seeds)
    mixed = [text for pair in zip(texts["train"], texts["prose"], strict=False) for text in pair] + texts["train"]
    return calibrated(ask.base, mixed, 0, ask.size.calibration)


def _matched_ways(
    path: Path,
    model: CausalQwenModel,
    tokenizer: NumericalAwareTokenizer,
    prompts: list[str],
    size: Sizes,
    say: Callable[[str], None],
) -> dict[str, Way]:
    """`WAYS` at temperatures whose texts differ as much as those of ordinary sampling; kept in the file."""
    if not path.is_file():
        pilot = (size.individuals, min(PILOT_WORDS, size.words))
        few = prompts[:PILOT_PROMPTS]
        goal = diversity(write(model, tokenizer, few, FREE[ORDINARY], *pilot, seed=0, judged=False).ids)
        found = {}
        for name, (way, span) in WAYS.items():
            say(f"{name}: its temperature, for a diversity of {goal:.2f}")
            found[name] = matched(model, tokenizer, few, way, goal, span, *pilot, seed=0).temperature
        write_atomically(path, json.dumps(found))
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {name: way.at(kept[name]) for name, (way, _) in WAYS.items()}


def summary(every: list[dict[str, Any]], writers: int) -> dict[str, Any]:
    """Claims, tables and pictures from the measures of all seeds. writers: N."""

    def of(name: str, measure: str) -> list[float]:
        return [float(seed[name][measure]) for seed in every]

    measures = ("temperature", "diversity", "same writer", "writer named", "surprise", "distinct pairs")
    rows = [[name, *(cell(of(name, measure)) for measure in measures)] for name in every[0]]
    counts = [[name, cell([float(seed[OWN]["words"][name]) for seed in every])] for name in every[0][OWN]["words"]]
    examples = [[name, text] for name in every[0] for text in every[0][name]["examples"][:2]]
    points = {name: sorted((seed[name]["surprise"], seed[name]["same writer"]) for seed in every) for name in every[0]}
    chart = line_chart(
        "Manner kept, and its price", points, "surprise, nats a word", "AUROC, same writer", joined=False
    )
    return {
        "claims": [claim.judged() for claim in _claims(every, writers)],
        "tables": [
            {"title": f"{writers} writers; surprise in nats a word", "head": ["", *measures], "rows": rows},
            {"title": f"Different words at a position of {DRAWN} individuals", "head": ["", "words"], "rows": counts},
            {"title": f"Examples: {PROMPTS[0]} ...", "head": ["", "text"], "rows": examples},
        ],
        "pictures": {"manner": chart},
        "details": every,
    }


def _claims(every: list[dict[str, Any]], writers: int) -> list[Claim]:
    def of(name: str, measure: str) -> list[float]:
        return [float(seed[name][measure]) for seed in every]

    def less(measure: str, name: str, other: str) -> list[float]:
        return [a - b for a, b in zip(of(name, measure), of(other, measure), strict=True)]

    def words(measure: str) -> list[float]:
        return [float(seed[OWN]["words"][measure]) for seed in every]

    _, nucleus, replay, constant = WAYS
    of_both = zip(words("default"), words("softmax"), strict=True)
    return [
        Claim("an individual keeps its manner", "AUROC of the same writer", 0.5, of(OWN, "same writer")),
        Claim("its texts name it", "share named", 1 / writers, of(OWN, "writer named")),
        Claim("it keeps it better than replayed noise", "AUROC, difference", 0.0, less("same writer", OWN, replay)),
        Claim("it keeps it better than constant noise", "AUROC, difference", 0.0, less("same writer", OWN, constant)),
        Claim(
            "16 individuals choose as many different words as 16 draws of softmax",
            "the smaller count by the larger",
            0.9,
            [min(a, b) / max(a, b) for a, b in of_both],
        ),
        Claim(
            "their texts differ as much as ordinary samples",
            "diversity, individual less 0.9 of ordinary",
            0.0,
            [a - 0.9 * b for a, b in zip(of(OWN, "diversity"), of(ORDINARY, "diversity"), strict=True)],
        ),
        Claim(
            "and are no worse",
            "surprise, ordinary less individual (nats)",
            0.0,
            less("surprise", ORDINARY, OWN),
        ),
        Claim(
            "nor worse than a nucleus",
            "surprise, nucleus less individual (nats)",
            0.0,
            less("surprise", nucleus, OWN),
        ),
        Claim(
            "nor do they repeat themselves more",
            "distinct pairs of words, individual less ordinary",
            0.0,
            less("distinct pairs", OWN, ORDINARY),
        ),
    ]
