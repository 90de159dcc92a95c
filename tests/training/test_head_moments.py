"""The heads' moments, spread over the ranks with equal copies: the steps of one process, bytes and saved tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Pool, groups_of
from torch import Tensor, nn

from cqwen_dist.checkpoint.manifest import Retention, checkpoint_folder
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.checkpoint.saving import About, Saver
from cqwen_dist.config import Config, Stage
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.parallel.groups import ALONE, Groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.stage_sizes import stage_sizes
from cqwen_dist.training import optim as moments_module
from cqwen_dist.training.optim import MOMENTS, HeadOptimizer
from cqwen_dist.training.parameter_groups import Member, has_rows, head_members
from cqwen_dist.training.stages import Schedule

BETAS, DECAY, LR = (0.9, 0.999), 0.1, 1e-2
CLIP = torch.tensor(0.5)
STEPS = 3
PLAN = Schedule([Stage(name="all", train=["heads"], steps=99, lr=LR, schedule="constant")], 1).at(0)
RANKS = [(1, 1), (2, 1), (3, 1), (4, 2), (4, 4)]
Shape = tuple[int, int, int]  # V, H, C
# Ranges of whole vectors of 16 numbers; ranges with tails; 3 rows, which are fewer than 4 ranks.
SHAPES: list[Shape] = [(64, 16, 16), (101, 7, 9), (4, 5, 3)]
# Of weights and moments of order 1: the ranks' sums may come in another order, and AdamW's last numbers of a range are
# stepped without vector instructions. A rounding of a gradient moves a weight by LR times its relative size, at most.
TOLERANCE = 1e-6


def heads_of(shape: Shape, rows: slice) -> list[Member]:
    """Members of the heads, from a seed, with these rows of all."""
    vocab, hidden, causal = shape
    torch.manual_seed(3)
    heads = nn.ModuleDict({"abduction": AbductionNetwork(hidden, causal), "action": ActionNetwork(causal, vocab)})
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    for name in ("cls_weight", "cls_bias", "threshold"):
        whole = getattr(heads["action"], name).detach()
        setattr(heads["action"], name, nn.Parameter(whole[rows].clone()))
    return head_members(heads.requires_grad_(False))


def gradient(name: str, shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    """Of a whole parameter in a step: a rank's; of rows, a replica's."""
    seed = 1000 * sum(map(ord, name)) + 10 * step + rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(shape: Shape, groups: Groups) -> slice:
    return slice(*vocab_range(shape[0], groups.vocab_rank, groups.vocab_size))


def begun(shape: Shape, groups: Groups, offload: bool = False) -> HeadOptimizer:
    optimizer = HeadOptimizer(heads_of(shape, rows_of(shape, groups)), groups, DECAY, offload)
    optimizer.enter_stage(PLAN, PLAN.stage.groups)
    optimizer.set_lr(PLAN, 0)
    return optimizer


def take(optimizer: HeadOptimizer, shape: Shape, steps: range) -> list[float]:
    """Steps with this rank's gradients; the norms."""
    groups, norms = optimizer.groups, []
    rank = 0 if groups.world is None else groups.world.rank()
    for step in steps:
        for m in optimizer.members:
            if m.has_rows:
                whole = gradient(m.name, (shape[0], *m.parameter.shape[1:]), step, groups.replica_rank)
                m.parameter.grad = whole[rows_of(shape, groups)].clone()
            else:
                m.parameter.grad = gradient(m.name, tuple(m.parameter.shape), step, rank)
        norms.append(float(optimizer.reduce_gradients().sqrt()))
        optimizer.step(CLIP)
    return norms


def plainly(shape: Shape, world: int, group: int, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle: torch's AdamW on whole parameters, by the gradients' mean. ({weights and moments}, norms)"""
    members, norms = heads_of(shape, slice(None)), []
    adamw = torch.optim.AdamW(
        [{"params": [m.parameter], "lr": PLAN.lr(m.group, m.is_scale, 0), "weight_decay": DECAY * m.decays}
         for m in members],
        betas=BETAS, fused=True,
    )  # fmt: skip
    for step in range(steps):
        gradients = []
        for m in members:
            ranks = range(world // group if m.has_rows else world)
            gradients.append(sum(gradient(m.name, tuple(m.parameter.shape), step, rank) for rank in ranks) / world)
            m.parameter.grad = gradients[-1] * CLIP
        norms.append(float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()))
        adamw.step()
    found = {m.name: m.parameter.detach() for m in members}
    found |= {f"{m.name}.{key}": adamw.state[m.parameter][key] for m in members for key in MOMENTS}
    return found, norms


def saved(optimizer: HeadOptimizer, shape: Shape, run: str) -> None:
    """Save the moments as `training.state` does. Collective."""
    moments, steps = optimizer.moments()
    rows = {name: value for name, value in moments.items() if has_rows(name, False)}
    heads = {name: value for name, value in moments.items() if name not in rows}
    first, (start, stop) = rows_of(shape, optimizer.groups).start, optimizer.of_rows.written
    state = TrainState(
        {}, {}, {}, heads, {}, rows, (first, first), (first + start, first + stop), {"head_steps": steps}
    )
    saver = Saver(Path(run), optimizer.groups, Retention())
    saver.save(lambda: state, About(1, "all"))
    saver.wait()


def of_rank(shape: Shape, group: int, run: str) -> dict[str, Any]:
    """What this rank has after STEPS steps; the same with the moments offloaded, a few rows at once."""
    groups = groups_of(group)
    moments_module.HOST_BLOCK = 40
    optimizer, moved = begun(shape, groups), begun(shape, groups, offload=True)
    norms = take(optimizer, shape, range(STEPS))
    assert norms == take(moved, shape, range(STEPS))
    for mine, theirs in zip(optimizer.shares, moved.shares, strict=True):
        assert torch.allclose(mine.member.parameter, theirs.member.parameter, rtol=0, atol=TOLERANCE)
        assert mine.moments.keys() == theirs.moments.keys() == set(MOMENTS)
    saved(optimizer, shape, run)
    rows = rows_of(shape, groups)
    weights = {m.name: m.parameter.detach().numpy() for m in optimizer.members}
    held = sum(moment.nbytes for share in optimizer.shares for moment in share.moments.values())
    return {"norms": norms, "weights": weights, "rows": (rows.start, rows.stop), "bytes": held}


def planned_bytes(shape: Shape, world: int, group: int) -> int:
    """The planner's moments of a rank."""
    vocab, hidden, causal = shape
    config = Config.model_validate(
        {
            "model": {"name_or_path": "unused", "causal_size": causal},
            "data": {"train": "unused"},
            "start": "seed",
            "stages": [{"name": "all", "train": ["heads"], "steps": 1}],
            "parallel": {"vocab_group_size": group},
            "train": {"global_batch_size": 24},
        }
    )
    base = Architecture.of(
        {"model_type": "qwen2", "vocab_size": vocab, "hidden_size": hidden, "num_attention_heads": 1}
    )
    (sizes,) = stage_sizes(config, base, world=world, kind="cpu")
    return 8 * sizes.stepped_head(sizes.reached)


ON_RANKS = pytest.mark.parametrize(("world", "group"), RANKS, ids=[f"{w} ranks in groups of {g}" for w, g in RANKS])
OF_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=["V {} H {} C {}".format(*shape) for shape in SHAPES])


@OF_SHAPES
@ON_RANKS
def test_spread_moments_step_as_one_process(pool: Pool, world: int, group: int, shape: Shape, tmp_path: Path) -> None:
    results = pool(of_rank, world, shape, group, str(tmp_path))
    wanted, norms = plainly(shape, world, group)
    exactly = world == 1 or (world == 2 and shape[2] == 16)  # the sum of two has one order, and no range a tail
    for rank, found in enumerate(results):
        assert found["norms"] == pytest.approx(norms, rel=1e-5), rank
        start, stop = found["rows"]
        for name, value in found["weights"].items():
            whole = wanted[name]
            expected = whole[start:stop] if has_rows(name, False) else whole
            off = float((torch.from_numpy(value) - expected).abs().max())
            assert off <= (0.0 if exactly else TOLERANCE), (rank, name, off)
    # copies are equal to the bit
    for rank, found in enumerate(results):
        usual = results[rank % group]["weights"]
        assert all((value == usual[name]).all() for name, value in found["weights"].items()), rank
    # bytes, of the rank with most rows
    assert results[0]["bytes"] == planned_bytes(shape, world, group)
    # what was saved is whole and by name
    state = load_checkpoint(checkpoint_folder(tmp_path, 1), (0, shape[0]))
    moments = {**state.head_moments, **state.row_moments}
    assert moments.keys() == {f"{name}.{key}" for name in results[0]["weights"] for key in MOMENTS}
    for name, value in moments.items():
        assert value.shape == wanted[name].shape, name
        assert float((value - wanted[name]).abs().max()) <= (0.0 if exactly else TOLERANCE), name
    assert set(state.state["head_steps"].values()) == {STEPS}


def resume(shape: Shape, group: int, run: str) -> None:
    """Load the saved moments, on any ranks, and save them again."""
    groups = groups_of(group)
    optimizer = begun(shape, groups)
    rows = rows_of(shape, groups)
    kept = [(rows.start + start, rows.start + stop) for start, stop in optimizer.of_rows.kept]
    state = load_checkpoint(checkpoint_folder(Path(run), 1), (rows.start, rows.stop), kept)
    optimizer.load_moments({**state.head_moments, **state.row_moments}, state.state["head_steps"])
    assert all(moment.shape == share.shape for share in optimizer.shares for moment in share.moments.values())
    saved(optimizer, shape, run)


@OF_SHAPES
def test_saved_moments_resume_on_any_ranks_to_the_bit(pool: Pool, shape: Shape, tmp_path: Path) -> None:
    def read() -> dict[str, Tensor]:
        state = load_checkpoint(checkpoint_folder(tmp_path, 1), (0, shape[0]))
        return {**state.head_moments, **state.row_moments}

    pool(of_rank, 4, shape, 2, str(tmp_path))
    before = read()
    for world, group in [(3, 1), (1, 1), (4, 1), (2, 2), (4, 4), (2, 1)]:
        pool(resume, world, shape, group, str(tmp_path))
        after = read()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before), (world, group)


@pytest.mark.gpu
def test_a_step_on_the_host_equals_the_gpus() -> None:
    """Offloaded, in blocks: moments on the host, weights on the GPU."""
    for shape in SHAPES:
        found = {}
        for offload in (False, True):
            members = heads_of(shape, slice(None))
            for m in members:
                m.parameter.data = m.parameter.data.cuda()
            optimizer = HeadOptimizer(members, ALONE, DECAY, offload)
            optimizer.enter_stage(PLAN, PLAN.stage.groups)
            optimizer.set_lr(PLAN, 0)
            for step in range(STEPS):
                for m in members:
                    m.parameter.grad = gradient(m.name, tuple(m.parameter.shape), step, 0).cuda()
                optimizer.reduce_gradients()
                optimizer.step(CLIP.cuda())
            kinds = {moment.device.type for share in optimizer.shares for moment in share.moments.values()}
            assert kinds == {"cpu" if offload else "cuda"}
            found[offload] = {m.name: m.parameter.detach().cpu() for m in members}
        for name, value in found[True].items():
            assert float((value - found[False][name]).abs().max()) <= TOLERANCE, (shape, name)
