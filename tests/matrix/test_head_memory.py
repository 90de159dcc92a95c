"""What a rank holds of the heads' rows falls as one over the vocabulary group's size: counted, not estimated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import Pool, run_ranks
from torch import nn

from cqwen_dist.config import Stage
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.training.optim import HeadOptimizer
from cqwen_dist.training.parameter_groups import head_members
from cqwen_dist.training.stages import Schedule

MIB = 2**20


def resident_mib(which: str) -> float:
    """Of this process: VmRSS now, VmHWM at its peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(which))


def one_step(vocab: int, hidden: int, tokens: int) -> dict[str, Any]:
    """A step of the action head alone on all ranks as one group: bytes of its rows' tensors, its peak growth."""
    import torch.distributed as dist

    groups = build_groups(dist.get_world_size())
    before = resident_mib("VmRSS")
    start, stop = vocab_range(vocab, groups.vocab_rank, groups.vocab_size)
    torch.manual_seed(0)
    action = ActionNetwork(hidden, vocab, vocab_start=start, rows=stop - start)
    heads = nn.ModuleDict({"action": action})
    heads.requires_grad_(False)
    optimizer = HeadOptimizer(head_members(heads, "per-word", False), groups, 0.0)
    plan = Schedule([Stage(name="heads", train=["heads"], steps=1)], 1).at(0)
    optimizer.enter_stage(plan, frozenset())
    optimizer.set_lr(plan, 0)
    loc, scale = torch.randn(tokens, hidden), torch.full((tokens, hidden), 1e-3)
    fused_loss(
        action,
        Cauchy(loc, scale),
        TokenLabels(
            torch.randint(0, vocab, (tokens,)), NumberLabels(torch.zeros(tokens), torch.zeros(tokens, dtype=torch.bool))
        ),
        LossOptions(vocab - 1),
        token_weight=1.0 / tokens,
        number_weight=0.0,
        group=groups.vocab,
    ).loss.backward()
    gradients = sum(m.parameter.grad.nbytes for m in optimizer.members if m.has_rows)
    optimizer.reduce_gradients()
    optimizer.step(1.0)
    rows = [m.parameter for m in optimizer.members if m.has_rows]
    moments = sum(m.nbytes for share in optimizer.shares if share.member.has_rows for m in share.moments.values())
    weights = sum(p.nbytes for p in rows) + action.cls_bias.nbytes
    return {"weights": weights, "gradients": gradients, "moments": moments, "peak_mib": resident_mib("VmHWM") - before}


def total(found: dict[str, Any]) -> int:
    return int(found["weights"] + found["gradients"] + found["moments"])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_fall_as_one_over_the_group(pool: Pool, world: int) -> None:
    vocab, hidden = 1201, 16
    whole = pool(one_step, 1, vocab, hidden, 8)[0]
    assert total(whole) == vocab * (4 * 4 * (hidden + 1) + 4)  # W_cls, C: weight, gradient, moments; b_cls: weight
    parts = pool(one_step, world, vocab, hidden, 8)
    assert sum(total(part) for part in parts) == total(whole)
    for rank, part in enumerate(parts):
        start, stop = vocab_range(vocab, rank, world)
        for kind in ("weights", "gradients", "moments"):
            assert part[kind] == whole[kind] * (stop - start) // vocab


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_peak_memory_at_qwens_vocabulary(world: int) -> None:
    """V 151,936, H 896: what is counted, and by how much the process grew at its peak (printed)."""
    vocab, hidden = 151_936, 896
    for rank, found in enumerate(run_ranks(one_step, world, vocab, hidden, 16)):
        start, stop = vocab_range(vocab, rank, world)
        assert total(found) == (stop - start) * (4 * 4 * (hidden + 1) + 4)
        print(f"{world} ranks, rank {rank}: {total(found) / MIB:,.0f} MiB counted, peak + {found['peak_mib']:,.0f} MiB")
        assert found["peak_mib"] < 1.25 * total(found) / MIB + 150
