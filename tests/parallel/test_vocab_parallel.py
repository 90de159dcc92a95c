"""The sharded loss on gloo ranks against one process with the whole vocabulary: losses, sums, every gradient.

The ranks stay up for the whole file; each case builds its data from a seed, alike on all ranks.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.numerics import assert_close, ovr_prob_at, ovr_top_word
from support.ranks import Pool, groups_of
from support.tiny import random_batch, tiny_model
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import OvrOptions, TermOptions, WordHead, linear_ovr
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_loss, vocab_parallel_scores, vocab_range

C = 6
COUNTS = {
    2: [(3, 4), (5, 0), (0, 0)],
    3: [(4, 0, 7), (0, 5, 0), (3, 3, 3)],
    4: [(4, 0, 7, 1), (0, 0, 2, 0), (3, 3, 3, 3)],
}  # tokens by rank
VOCABULARIES = (13, 9, 3)  # on 4 ranks: 4 4 4 1, 3 3 3 0, 1 1 1 0
GROUPS = {
    f"{world} ranks in groups of {size}": (world, size) for world, size in ((2, 2), (3, 3), (4, 1), (4, 2), (4, 4))
}
IN_GROUPS = pytest.mark.parametrize(("world", "group"), GROUPS.values(), ids=GROUPS)
SHARES = ["uneven", "one rank has all", "even"]  # of COUNTS
OF_TOKENS = pytest.mark.parametrize("tokens", range(3), ids=SHARES)
OF_WORDS = pytest.mark.parametrize("v", VOCABULARIES, ids=[f"{v} words" for v in VOCABULARIES])


def with_groups(check: Callable[..., None], size: int, *args: Any) -> None:
    """On a rank: check(groups, *args)."""
    check(groups_of(size), *args)


def counts_of(tokens: int) -> tuple[int, ...]:
    return COUNTS[dist.get_world_size()][tokens]


class Problem:
    """A head and the tokens of all ranks; `part` is what one vocabulary group of consecutive ranks has of them."""

    def __init__(self, v: int, counts: tuple[int, ...], seed: int = 0, scalar: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        n = sum(counts)
        self.v, self.counts = v, counts
        self.loc, self.scale = torch.randn(n, C, generator=g), torch.rand(n, C, generator=g) + 0.05
        self.weight, self.bias = torch.randn(v, C, generator=g), torch.randn(v, generator=g)
        self.threshold = torch.randn((), generator=g) if scalar else torch.randn(v, generator=g)
        self.labels = torch.randint(0, v, (n,), generator=g)
        self.labels[torch.rand(n, generator=g) < 0.2] = -100
        self.token_weights, self.p_weights = torch.rand(n, generator=g), torch.randn(n, generator=g)
        self.class_weights = torch.rand(v, generator=g)

    def tokens(self, ranks: list[int]) -> slice:
        starts = [sum(self.counts[:r]) for r in range(len(self.counts) + 1)]
        return slice(starts[ranks[0]], starts[ranks[-1] + 1])


def members(groups: Groups) -> list[int]:
    return dist.get_process_group_ranks(groups.vocab)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def near(found: Tensor, wanted: Tensor, whole: Tensor, name: str) -> None:
    """Of the largest entry of the whole tensor; a rank may have nothing of it."""
    size = float(whole.abs().max()) if whole.numel() else 0.0
    error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= 1e-5 * size, f"{name}: {error:.1e} of {size:.1e}"


def check_loss(groups: Groups, problem: Problem, **options: Any) -> None:
    """loss, per_token, prob_sum, p_num and the gradients of loss + sum(p_num * a) against one process."""
    rank, ranks, num = dist.get_rank(), members(groups), problem.v - 2
    every = problem.tokens(ranks)
    whole = leaves(problem.loc[every], problem.scale[every], problem.weight, problem.bias, problem.threshold)
    class_weights = problem.class_weights if options.pop("class_weights", False) else None
    # the oracle: all tokens of the group, the whole vocabulary
    expected = linear_ovr(
        *whole,
        problem.labels[every],
        token_weights=problem.token_weights[every],
        class_weights=class_weights,
        want_prob_sum=True,
        **options,
    )
    p_num = ovr_prob_at(*whole, torch.tensor([num]))[:, 0]
    (expected.loss + (p_num * problem.p_weights[every]).sum()).backward()
    # this rank's share
    own = problem.tokens([rank])
    v0, v1 = vocab_range(problem.v, groups.vocab_rank, groups.vocab_size)
    rows = slice(v0, v1)
    scalar = problem.threshold.ndim == 0
    mine = leaves(
        problem.loc[own],
        problem.scale[own],
        problem.weight[rows],
        problem.bias[rows],
        problem.threshold if scalar else problem.threshold[rows],
    )
    head = WordHead(*mine[2:], v0, problem.v, options.pop("used_rows", None))
    asked = OvrOptions(None if class_weights is None else class_weights[rows], **options)
    labels, weights = problem.labels[own], problem.token_weights[own]
    out = vocab_parallel_loss(Cauchy(*mine[:2]), head, labels, weights, asked, groups.vocab, num)
    (out.loss + (out.p_num * problem.p_weights[own]).sum()).backward()
    inside = slice(own.start - every.start, own.stop - every.start)
    assert_close(out.loss, expected.loss, 1e-5, "loss")
    assert_close(out.per_token, expected.per_token[inside], 1e-5, "per_token")
    assert_close(out.prob_sum, expected.prob_sum[inside], 1e-5, "prob_sum")
    assert (out.nll is None) == (expected.nll is None)
    if out.nll is not None:
        assert_close(out.nll, expected.nll[inside], 1e-5, "nll")
    assert_close(out.p_num, p_num[inside], 1e-5, "p_num")
    for tensor in (out.per_token, out.prob_sum):
        assert not tensor.requires_grad
        assert tensor.dtype == torch.float32
    grads = [t.grad for t in whole]
    if scalar:  # no row: the caller sums it over the group
        dist.all_reduce(mine[4].grad, group=groups.vocab)
    shares = (inside, inside, rows, rows, ... if scalar else rows)
    names = ("loc_u", "scale_u", "weight", "bias", "threshold")
    for name, leaf, grad, share in zip(names, mine, grads, shares, strict=True):
        near(leaf.grad, grad[share], grad, f"gradient of {name}")


def losses(groups: Groups, v: int, tokens: int) -> None:
    check_loss(groups, Problem(v, counts_of(tokens)))


@OF_TOKENS
@OF_WORDS
@IN_GROUPS
def test_loss_and_gradients_equal_one_process(pool: Pool, world: int, group: int, v: int, tokens: int) -> None:
    pool(with_groups, world, losses, group, v, tokens)


def losses_with(groups: Groups, scalar: bool, options: dict[str, Any]) -> None:
    problem = Problem(13, counts_of(0), scalar=scalar)
    if "used_rows" in options:
        problem.labels.clamp_(max=options["used_rows"] - 1)
    check_loss(groups, problem, **options)


@pytest.mark.parametrize(
    ("scalar", "options"),
    [
        pytest.param(True, {}, id="one threshold for all words"),
        pytest.param(False, {"class_weights": True}, id="class weights"),
        pytest.param(False, {"impl": "reference"}, id="reference"),
        pytest.param(False, {"used_rows": 9}, id="spare rows"),
        pytest.param(False, {"terms": TermOptions(1.0, 3.0)}, id="softmax term"),
        pytest.param(True, {"terms": TermOptions(0.0, 3.0), "impl": "reference"}, id="softmax term, reference"),
    ],
)
@IN_GROUPS
def test_options_of_the_loss(pool: Pool, world: int, group: int, scalar: bool, options: dict[str, Any]) -> None:
    pool(with_groups, world, losses_with, group, scalar, options)


def one_trainable(groups: Groups, trainable: int) -> None:
    """Every rank enters the same collectives in backward, whichever input alone is trained."""
    problem = Problem(13, counts_of(0))
    own = problem.tokens([dist.get_rank()])
    v0, v1 = vocab_range(13, groups.vocab_rank, groups.vocab_size)
    tensors = [problem.loc[own], problem.scale[own], problem.weight[v0:v1], problem.bias[v0:v1]]
    tensors.append(problem.threshold[v0:v1])
    mine = [t.clone().requires_grad_(i == trainable) for i, t in enumerate(tensors)]
    u, head, labels = Cauchy(*mine[:2]), WordHead(*mine[2:], v0), problem.labels[own]
    out = vocab_parallel_loss(u, head, labels, group=groups.vocab, num_token_id=5)
    (out.loss + out.p_num.sum()).backward()
    assert [t.grad is not None for t in mine] == [i == trainable for i in range(5)]
    assert bool(mine[trainable].grad.isfinite().all())


@pytest.mark.parametrize("trainable", range(5), ids=["loc_u", "scale_u", "weight", "bias", "threshold"])
@IN_GROUPS
def test_one_input_alone_is_trained(pool: Pool, world: int, group: int, trainable: int) -> None:
    pool(with_groups, world, one_trainable, group, trainable)


def conjugate_pairs(groups: Groups) -> None:
    """<f(x), y> = <x, f*(y)>, summed over the ranks of the group, f* being what backward computes."""
    group, g = groups.vocab, torch.Generator().manual_seed(dist.get_rank())
    counts = [2, 0, 3, 1][: group.size()]
    mine, total = counts[group.rank()], sum(counts)
    assert exchange_counts(mine, group, torch.device("cpu")) == counts
    for mapping, n_in, n_out in ((gather_tokens, mine, total), (scatter_sum_tokens, total, mine)):
        x = torch.randn(n_in, 3, dtype=torch.float64, generator=g, requires_grad=True)
        y = torch.randn(n_out, 3, dtype=torch.float64, generator=g)
        out = mapping(x, counts, group)
        assert out.shape == y.shape
        out.backward(y)
        products = torch.stack([(out * y).sum(), (x * x.grad).sum()]).detach()
        dist.all_reduce(products, group=group)
        assert_close(products[0], products[1], 1e-12, mapping.__name__)
    rows = torch.full((mine, 2), float(group.rank()))
    expected = torch.cat([torch.full((n, 2), float(r)) for r, n in enumerate(counts)])
    assert torch.equal(gather_tokens(rows, counts, group), expected)
    assert torch.equal(scatter_sum_tokens(expected, counts, group), rows * group.size())
    labels = gather_tokens(torch.full((mine,), group.rank(), dtype=torch.int64), counts, group)
    assert labels.dtype == torch.int64
    bf16 = gather_tokens(rows.bfloat16().requires_grad_(), counts, group)
    bf16.sum().backward()
    assert bf16.dtype == torch.bfloat16
    part = torch.tensor([1.0 + group.rank(), 2.0], requires_grad=True)
    whole = sum_partials(part, group)
    assert whole.tolist() == [sum(range(1, group.size() + 1)), 2.0 * group.size()]
    upstream = torch.tensor([3.0, 5.0])
    whole.backward(upstream)
    assert torch.equal(part.grad, upstream)


@IN_GROUPS
def test_each_mapping_is_the_adjoint_of_its_backward(pool: Pool, world: int, group: int) -> None:
    pool(with_groups, world, conjugate_pairs, group)


def best_words(groups: Groups, v: int, rank_by: str) -> None:
    """The best word over the group's ranges is the unsharded one; ties too."""
    rank = dist.get_rank()
    problem = Problem(v, counts_of(0), seed=3)
    own, (v0, v1) = problem.tokens([rank]), vocab_range(v, groups.vocab_rank, groups.vocab_size)
    for scale in (problem.scale, torch.zeros_like(problem.scale)):  # without scale z is -+inf: loc decides
        for used in (None, max(1, v - 4)):
            expected = ovr_top_word(
                problem.loc, scale, problem.weight, problem.bias, problem.threshold, used_rows=used,
                rank_by=rank_by,
            )  # fmt: skip
            rows = (t[v0:v1] for t in (problem.weight, problem.bias, problem.threshold))
            mine = WordHead(*rows, start=v0, used_rows=used)
            u = Cauchy(problem.loc[own], scale[own])
            labels = torch.full((len(u.loc),), -100)
            found = vocab_parallel_scores(u, mine, labels, groups.vocab, rank_by=rank_by).best
            assert torch.equal(found.word, expected.word[own]), (v, used, rank_by, found, expected)
            finite = expected.score[own].isfinite()
            assert_close(found.score[finite], expected.score[own][finite], 1e-5, "scores")
            assert torch.equal(found.score[~finite], expected.score[own][~finite])


@pytest.mark.parametrize("rank_by", ["ovr", "loc"])
@OF_WORDS
@IN_GROUPS
def test_best_word_equals_one_process(pool: Pool, world: int, group: int, v: int, rank_by: str) -> None:
    pool(with_groups, world, best_words, group, v, rank_by)


def head(problem: Problem, start: int, stop: int) -> ActionNetwork:
    """An action network with rows [start, stop) of the problem's vocabulary; the rest alike on every rank."""
    torch.manual_seed(8)
    net = ActionNetwork(C, problem.v, vocab_start=start, rows=stop - start)
    with torch.no_grad():
        net.reg_weight.copy_(torch.linspace(-1, 1, C))
        net.b_noise.copy_(torch.linspace(0.1, 0.3, C))
        net.cls_weight.copy_(problem.weight[start:stop])
        net.cls_bias.copy_(problem.bias[start:stop])
        net.threshold.copy_(problem.threshold[start:stop])
    return net


def fused_losses(groups: Groups, tokens_of_ranks: int, gate_grad: str) -> None:
    """Word and number loss together, gate with and without gradient through P_NUM of another rank's row."""
    ranks, num = members(groups), 4
    problem = Problem(13, counts_of(tokens_of_ranks), seed=5)
    problem.labels[::3] = num
    targets = problem.p_weights * 2
    terms = {}
    own = vocab_range(13, groups.vocab_rank, groups.vocab_size)
    for who, tokens, (v0, v1), group in (
        ("one", problem.tokens(ranks), (0, 13), None),
        ("many", problem.tokens([dist.get_rank()]), own, groups.vocab),
    ):
        net = head(problem, v0, v1)
        u = leaves(problem.loc[tokens], problem.scale[tokens])
        out = fused_loss(
            net,
            Cauchy(*u),
            TokenLabels(problem.labels[tokens], NumberLabels(targets[tokens], problem.labels[tokens] == num)),
            LossOptions(num, gate_grad=gate_grad),
            token_weight=0.2,
            number_weight=0.5,
            group=group,
        )
        out.loss.backward()
        terms[who] = (out, net, u, tokens)
    one, many = terms["one"], terms["many"]
    sums = torch.stack([many[0].loss.detach(), many[0].cls_sum, many[0].reg_sum])
    dist.all_reduce(sums, group=groups.vocab)
    # every rank's loss holds the words of the whole group once, and its own numbers
    sums[0] -= (groups.vocab_size - 1) * 0.2 * one[0].cls_sum
    wanted = torch.stack([one[0].loss.detach(), one[0].cls_sum, one[0].reg_sum])
    assert_close(sums, wanted, 1e-5, "loss, cls_sum, reg_sum")
    inside = slice(many[3].start - one[3].start, many[3].stop - one[3].start)
    for name, a, b in zip(("loc_U", "scale_U"), many[2], one[2], strict=True):
        near(a.grad, b.grad[inside], b.grad, name)
    rows = slice(*own)
    for name in ("cls_weight", "cls_bias", "threshold"):  # of the group's tokens, whole
        a, b = many[1].get_parameter(name).grad, one[1].get_parameter(name).grad
        near(a, b[rows], b, name)
    for name in ("reg_weight", "reg_bias", "b_noise"):  # of own tokens: the engine sums them over all ranks
        a = many[1].get_parameter(name).grad
        dist.all_reduce(a, group=groups.vocab)
        assert_close(a, one[1].get_parameter(name).grad, 1e-5, name)


@pytest.mark.parametrize("gate_grad", ["full", "stop"])
@pytest.mark.parametrize("tokens", range(2), ids=SHARES[:2])
@IN_GROUPS
def test_words_and_numbers_equal_one_process(pool: Pool, world: int, group: int, tokens: int, gate_grad: str) -> None:
    pool(with_groups, world, fused_losses, group, tokens, gate_grad)


def calibration(groups: Groups) -> None:
    """Every rank ends with the same constants, and with one process's on all the tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = [random_batch(2 + r, 8, seed=r) for r in range(world)]
    model = tiny_model(start="calibrated", number_dims=2)
    one = calibrate(model, batches, max_tokens=10_000)
    start, stop = vocab_range(model.config.vocab_size, groups.vocab_rank, groups.vocab_size)
    part = tiny_model(start="calibrated", number_dims=2, vocab_start=start, rows=stop - start)
    found = calibrate(part, batches[rank : rank + 1], groups=groups, max_tokens=10_000)
    for name, value in asdict(one).items():
        if name not in ("law", "prob_sum_median"):  # a name; of each rank's own tokens
            assert abs(asdict(found)[name] - value) <= 1e-4 * abs(value), (name, value, found)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (found.threshold, found.gamma, found.loss, found.accuracy))
    assert len(set(everyone)) == 1
    assert_close(part.action.threshold, model.action.threshold[start:stop], 1e-4, "C")
    nothing = replace(batches[0], labels=torch.full_like(batches[0].labels, -100))
    calibrate(part, [batches[rank] if rank == world - 1 else nothing], groups=groups)  # ranks without a token


@IN_GROUPS
def test_calibration_equals_one_process(pool: Pool, world: int, group: int) -> None:
    pool(with_groups, world, calibration, group)


def memberships(groups: Groups) -> None:
    """Consecutive ranks share a vocabulary; replicas hold the same rows; a size that does not divide is refused."""
    world, rank, size = dist.get_world_size(), dist.get_rank(), groups.vocab_size
    first = rank // size * size
    assert members(groups) == list(range(first, first + size))
    assert dist.get_process_group_ranks(groups.replica) == list(range(rank % size, world, size))
    assert groups.world_size == world
    assert groups.vocab_rank == rank % size
    with pytest.raises(UserError, match=f"found 5, allowed: a divisor of the {world} rank"):
        build_groups(5)


@IN_GROUPS
def test_ranks_know_their_groups(pool: Pool, world: int, group: int) -> None:
    pool(with_groups, world, memberships, group)
