"""The states of the base's layers and their means, which the wide part reads: as a plain loop has them, and what they
add."""

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from support.numerics import assert_close
from support.ranks import run_ranks
from support.tiny import NUM, random_ids, tiny_base, tiny_model
from transformers import DynamicCache

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.config.errors import UserError
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.parallel.groups import build_groups

DEPTHS = 2
CLOSE = 1e-5  # fp32: a batch's products have other shapes than a row's, and sums begin elsewhere
SHAPE = {"number_dims": 2, "wide": 64, "depths": DEPTHS}


def plain(model: CausalQwenModel, ids: torch.Tensor) -> torch.Tensor:
    """[T,2 * DEPTHS * H] for one text [T] by transformers' own list of states, a position at a time: z and the others,
    and their means."""
    features, means = model.features, []
    zeros = torch.zeros(1, len(ids), dtype=torch.float64)
    seen = features.backbone.transformer(
        inputs_embeds=features.embedding(ids[None], zeros), output_hidden_states=True
    ).hidden_states
    layers = len(seen) - 1
    depths = (DEPTHS, *range(1, DEPTHS))
    states = torch.cat([seen[round(layers * depth / DEPTHS)][0] for depth in depths], -1).double()
    for end in range(len(ids)):
        means.append(states[1 : end + 1].mean(0) if end else torch.zeros_like(states[0]))
    return torch.cat([states, torch.stack(means)], -1)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text"])
def test_means_are_those_of_a_loop_over_single_texts(kind: str) -> None:
    model, lengths = tiny_model(kind, **SHAPE), (9, 5, 7)
    assert len(tiny_base(kind).model.layers) >= DEPTHS
    texts = [random_ids(1, length, seed)[0] for seed, length in enumerate(lengths)]
    with torch.no_grad():
        known = [plain(model, text) for text in texts]
        for left in (True, False):
            rows = [torch.nn.functional.pad(text, (9 - len(text), 0) if left else (0, 9 - len(text))) for text in texts]
            real = [
                torch.nn.functional.pad(text * 0 + 1, (9 - len(text), 0) if left else (0, 9 - len(text)))
                for text in texts
            ]
            ids, mask = torch.stack(rows), torch.stack(real)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            found = model.features(ids, torch.zeros(ids.shape, dtype=torch.float64), mask, position_ids=positions)
            for row, own, text in zip(found, mask.bool(), known, strict=True):
                assert_close(row[own].double(), text, CLOSE)


def test_a_text_in_pieces_with_a_cache_has_the_same_means() -> None:
    model, ids = tiny_model(**SHAPE), random_ids(2, 9)
    values, cache = torch.zeros(ids.shape, dtype=torch.float64), DynamicCache(config=model.config.base_config)
    with torch.no_grad():
        whole = model.features(ids, values)
        pieces = [
            model.features(ids[:, a:b], values[:, a:b], past_key_values=cache) for a, b in ((0, 4), (4, 5), (5, 9))
        ]
    assert_close(torch.cat(pieces, 1), whole, CLOSE)


def test_packed_texts_do_not_share_means() -> None:
    model, texts = tiny_model(**SHAPE), [random_ids(1, 4, 3), random_ids(1, 5, 4)]
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with torch.no_grad():
        packed = model.features(torch.cat(texts, 1), torch.zeros(1, 9, dtype=torch.float64), None, positions)
        alone = torch.cat([model.features(text, torch.zeros(text.shape, dtype=torch.float64)) for text in texts], 1)
    assert_close(packed, alone, CLOSE)


def ordered(rows: int, seed: int) -> Batch:
    """Texts of ten words with 3 and 4 among them, far apart; the number is 1 if 3 comes first, else -1, with noise."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 9, (rows, 10), generator=draw)
    first = torch.rand(rows, generator=draw) < 0.5
    for begin, word in ((3, torch.where(first, 3, 4)), (6, torch.where(first, 4, 3))):
        ids[torch.arange(rows), begin + torch.randint(2, (rows,), generator=draw)] = word
    y = torch.where(first, 1.0, -1.0).double() + 0.1 * torch.randn(rows, generator=draw, dtype=torch.float64)
    labels, numbers = torch.full_like(ids, IGNORE_INDEX), torch.zeros(rows, 10, dtype=torch.float64)
    labels[:, -1], numbers[:, -1] = NUM, y
    return Batch(
        input_ids=ids,
        numeric_values=torch.zeros_like(numbers),
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(10).expand(rows, -1),
        labels=labels,
        numeric_labels=numbers,
        numeric_mask=labels == NUM,
    )


def part_of(batch: Batch, rank: int, world: int) -> Batch:
    """The rows of a rank, in order."""
    own = {field.name: getattr(batch, field.name) for field in fields(batch) if field.init}
    return Batch(**{name: value.chunk(world)[rank] for name, value in own.items() if isinstance(value, torch.Tensor)})


def _predicted(depths: int) -> torch.Tensor:
    """What the wide part says of 400 new texts, after a start on this rank's share of 300, and 100 held-out ones that
    it alone learns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = {**SHAPE, "wide": 1024, "depths": depths}
    model = tiny_model(start="calibrated", **shape, base={"num_hidden_layers": 4})
    share, batch = (part_of(ordered(rows, seed), rank, world) for rows, seed in ((300, 0), (100, 2)))
    with torch.no_grad():
        more = [(batch, model.kept_features(batch, batch.numeric_mask.flatten().nonzero()[:, 0]))]
        calibrate(model, [share], groups=build_groups(1), beside_batches=more)
        new = ordered(400, 1)
        states = model.features(new.input_ids, new.numeric_values)
        return model.wide.eval()(new.input_ids, new.numeric_values, states=states)[0][0, :, -1]


def test_the_start_reads_the_order_of_words_in_the_means_on_any_number_of_ranks() -> None:
    """Words 3 and 4 are in every text. Which is first, no n-gram of three tells, but the states of later words do."""
    truth, errors = ordered(400, 1).numeric_labels[:, -1], []
    for depths in (0, DEPTHS):
        (found,) = run_ranks(_predicted, 1, depths)
        rest = truth - found
        errors.append(float((rest - rest.median()).abs().mean()))
    assert errors[1] < 0.5 * errors[0], errors
    for other in run_ranks(_predicted, 2, DEPTHS):
        assert_close(other, found, 1e-3)  # states of batches of other shapes, then a small ridge


@pytest.mark.parametrize("change", [{"depths": -1}, {"wide": 0, "number_dims": 2, "depths": 2}])
def test_depths_without_a_part_that_reads_them_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="depths"):
        tiny_model(**{**SHAPE, **change})
