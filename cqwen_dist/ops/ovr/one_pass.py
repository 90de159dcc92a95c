"""The OvR loss and its gradients in one pass over tiles, on any device.

The loss is a plain sum over words without a normaliser. So each tile [t tokens x n words] gives its loss *and* its
gradients at once: two GEMMs compute loc and scale, elementwise maths (`tile`) turns them into two gradients, and four
GEMMs multiply these on to the inputs. No tensor of size [N, V] exists, and backward recomputes no scores.

    x = loc_u, g = scale_u
    for each block of n words:
        for each block of t tokens:
            L = x W^T       S = g |W|^T
            L, S -> loss,   D_loc, D_scale          in place
            d_x += D_loc W                          d_g += D_scale |W|
            d_W += D_loc^T x + sign(W) * (D_scale^T g)

Token weights are an input, since one pass cannot know an upstream gradient per token. So masks and global denominators
are free.

Shape letters: N tokens, C causal dimensions, v words of the slice, t x n a tile of t tokens and n words.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import OvrOutput, Targets, WordHead
from cqwen_dist.ops.ovr.tile import Tile, TileMaths
from cqwen_dist.ops.products import gemm_dtype, mm_into
from cqwen_dist.tiles import tile_shape


class Needs(NamedTuple):
    """Flags: the differentiable inputs that need a gradient."""

    loc_u: bool = False
    scale_u: bool = False
    weight: bool = False
    bias: bool = False
    threshold: bool = False


Gradients = tuple[Tensor | None, ...]  # in the order of `Needs`, in the dtype of each input; None if not needed


def visit(u: Cauchy, head: WordHead, targets: Targets, need: Needs, maths: TileMaths) -> tuple[OvrOutput, Gradients]:
    """The sums, and the needed gradients for an upstream gradient of 1.

    GEMMs run in the dtype that `gemm_dtype` gives for U's. For bf16 GEMMs an fp32 weight is rounded block by block: no
    full copy exists, and its gradient stays fp32.
    """
    work = _Visit(u, head, targets, need, maths)
    tokens, rows = len(u.loc), head.rows
    # Words outside, tokens inside: a block of W is converted once, and its gradient is complete after the inner loop.
    # The gradient of U is summed over all blocks, but [N, C] is small next to W.
    with torch.cuda.device_of(u.loc):  # Triton launches on the current device, not on that of the tensors
        for v0 in range(0, rows, work.n):
            block = work.open_block(slice(v0, min(rows, v0 + work.n)))
            for i0 in range(0, tokens, work.t):
                work.visit_tile(block, slice(i0, min(tokens, i0 + work.t)))
            work.close_block(block)
    return work.sums(), work.gradients()


@torch.no_grad()
def log_norm(u: Cauchy, head: WordHead, targets: Targets, maths: TileMaths) -> Tensor:
    """log sum_k exp(loc_S,k) [N] over the words in use, fp32 (fp64): a pass before `visit`, of one product.

    It is needed before the gradients of the softmax term. The scores are those of `visit`, rounded alike.
    """
    work = _Visit(u, head, targets, Needs(), maths)
    total = torch.full((len(u.loc),), -torch.inf, dtype=torch.float64, device=u.loc.device)
    with torch.cuda.device_of(u.loc):
        for v0 in range(0, head.rows, work.n):
            block = work.open_block(slice(v0, min(head.rows, v0 + work.n)), scales=False)
            for i0 in range(0, len(u.loc), work.t):
                some = slice(i0, min(len(u.loc), i0 + work.t))
                tile = work.tile(block, some)
                tile.locations(maths.reads_gap)
                total[some] = torch.logaddexp(total[some], maths.log_norm(tile).double())
    return total.to(head.real)


class _Block(NamedTuple):
    """n words: their rows in the dtype of the GEMMs, and the two parts of their gradient."""

    words: slice
    rows: Sequence[Tensor]  # [n, C] W; |W|, overwritten by sign(W) after the last tile
    sums: Sequence[Tensor] | None  # [n, C] D_loc^T x, at the end the full gradient; [n, C] D_scale^T g


class _Visit:
    """The phases of `visit`, with inputs, sums, and buffers shared by all tiles."""

    def __init__(self, u: Cauchy, head: WordHead, targets: Targets, need: Needs, maths: TileMaths) -> None:
        self.u, self.head, self.targets, self.need, self.maths = u, head, targets, need, maths
        self.real = real = head.real
        gemm = gemm_dtype(u.loc.dtype, u.loc.device)

        # Inputs, in the dtype of their use. Bias and threshold only matter as one offset C - b.
        self.x, self.g = u.loc.detach().to(gemm), u.scale.detach().to(gemm)
        self.offset = head.threshold.detach().to(real).expand(len(head.weight)).contiguous()  # as kernels read it
        self.bias = torch.zeros_like(self.offset)
        if head.bias is not None:
            self.bias = head.bias.detach().to(real).contiguous()
            self.offset = self.offset - self.bias
        self.leading = self.offset.to(gemm)
        if gemm != real and not head.weight.is_cuda and not self._labels_near():
            self.leading.zero_()

        # Sums, to which the tiles add. d_gap, d_bias [v] are sums over tokens. The sums per token are fp64, since many
        # tiles are added to a token, one after another.
        n, c = self.x.shape
        self.d_u = self.x.new_zeros(2, n, c, dtype=real) if any(need[:2]) else None
        self.d_w = torch.empty_like(head.weight) if need.weight else None
        self.d_gap = self.x.new_zeros(len(head.weight), dtype=real) if need.threshold else None
        self.d_bias = self.x.new_zeros(len(head.weight), dtype=real) if need.bias else None
        self.per_token = torch.zeros(n, dtype=torch.float64, device=self.x.device)
        self.prob_sum = torch.zeros_like(self.per_token) if targets.want_prob_sum else None
        self.label_loc = None if targets.log_norm is None else torch.zeros_like(self.per_token)

        # Buffers, made once: an allocation for each tile would cost more than a small tile's products.
        # d_w itself is one of the sums if it has their dtype.
        self.t, self.n = tile_shape(n, head.rows, c, self.x.device.type, real.itemsize)
        size = self.t * (-(-self.n // maths.multiple) * maths.multiple)
        rows = 2 if head.weight.dtype != gemm else 1
        sums = (2 if head.weight.dtype != real else 1) if need.weight else 0
        self.work = self.x.new_empty(maths.buffers, size, dtype=real)
        # Zeros: a CPU's bf16 products may read the padding behind a row, and 0 times NaN is NaN
        self.low = self.x.new_zeros(2 if gemm != real else 0, size, dtype=gemm)
        self.rows = self.x.new_empty(rows, self.n * c, dtype=gemm)
        self.block_sums = self.x.new_empty(sums, self.n * c, dtype=real)

    def _labels_near(self) -> bool:
        """Whether the score of any label is nearer to its threshold than to 0: then rounding must be small there.

        Also true without labels.
        """
        row = self.targets.row.clamp(min=0)
        if not bool((self.targets.row >= 0).any()):
            return True
        loc = (self.x.to(self.real) * self.head.weight.detach()[row]).sum(1)
        return bool((((self.offset[row] - loc).abs() < loc.abs()) & (self.targets.row >= 0)).any())

    def open_block(self, words: slice, scales: bool = True) -> _Block:
        """W and |W| of a block of words in the dtype of the GEMMs, and buffers for its gradient. scales: make |W|."""
        shape = (words.stop - words.start, self.x.shape[1])
        rows = tuple(_cut(self.rows, *shape))
        if len(rows) == 2:
            rows[0].copy_(self.head.weight[words])
        else:
            rows = (self.head.weight.detach()[words], *rows)
        if scales:
            torch.abs(rows[0], out=rows[1])
        sums = None
        if self.d_w is not None:
            own = tuple(_cut(self.block_sums, *shape))
            sums = own if len(own) == 2 else (self.d_w[words], *own)
        return _Block(words, rows, sums)

    def tile(self, block: _Block, some: slice) -> Tile:
        """The tile of some tokens and the block's words."""
        words, targets = block.words, self.targets
        shape = (some.stop - some.start, words.stop - words.start)
        return Tile(
            x=self.x[some],
            g=self.g[some],
            w=block.rows[0],
            abs_w=block.rows[1],
            work=_cut(self.work, *shape, self.maths.multiple),
            low=_cut(self.low, *shape, self.maths.multiple),
            offset=self.offset[words],
            leading=self.leading[words],
            bias=self.bias[words],
            target=targets.row[some] - words.start,
            token_weights=targets.token_weights[some],
            class_weights=_at(targets.class_weights, words),
            per_token=self.per_token[some],
            prob_sum=_at(self.prob_sum, some),
            gap_sum=_at(self.d_gap, words),
            bias_sum=_at(self.d_bias, words),
            log_norm=_at(targets.log_norm, some),
            label_loc=_at(self.label_loc, some),
            terms=targets.terms,
        )

    def visit_tile(self, block: _Block, some: slice) -> None:
        """Add the loss of some tokens on the block's words, and multiply the score gradients on to U and W."""
        tile = self.tile(block, some)
        tile.scores(self.maths.reads_gap)
        if self.targets.seen is not None:
            offset = None if self.maths.reads_gap else tile.offset
            self.targets.seen.add(some, block.words.start, tile.work[0], tile.work[1], offset)
        d = self.maths(tile, any(self.need))
        if self.d_u is not None:
            _spread(d, block.rows, self.d_u[:, some], True)
        if block.sums is not None:  # the first tile writes, all others add: no pass to zero the buffers
            _spread([a.T for a in d], (tile.x, tile.g), block.sums, some.start > 0)

    def close_block(self, block: _Block) -> None:
        """Finish the weight gradient of a block: d_W = D_loc^T x + sign(W) * (D_scale^T g)."""
        if self.d_w is None or block.sums is None or not len(self.x):
            return
        # The gradient of |W| is sign(W), the same for all tokens: it is applied once a block, not once a tile
        block.sums[0].addcmul_(torch.sign(block.rows[0], out=block.rows[1]), block.sums[1])
        # With a weight in the sums' dtype, the sum was taken in d_w itself
        if block.sums[0].data_ptr() != self.d_w[block.words].data_ptr():
            self.d_w[block.words].copy_(block.sums[0])

    def sums(self) -> OvrOutput:
        """The sums over all tiles. Only the loss includes the token weights."""
        targets, weights, loss, nll = self.targets, self.targets.token_weights, self.per_token, None
        if targets.log_norm is not None and self.label_loc is not None:
            nll = torch.where(targets.row >= 0, targets.log_norm - self.label_loc, 0.0)
            loss = loss + targets.terms.softmax_weight * nll
            nll = nll.to(self.real)
        # A masked token's loss may be infinite, and 0 times infinity is NaN
        weighted = torch.where(weights != 0, weights * loss, 0.0)
        prob_sum = None if self.prob_sum is None else self.prob_sum.to(self.real)
        return OvrOutput(weighted.sum().to(self.real), self.per_token.to(self.real), prob_sum, nll)

    def gradients(self) -> Gradients:
        """The gradients for an upstream gradient of 1; zero for reserved rows."""
        d_bias = d_threshold = None
        bias, threshold = self.head.bias, self.head.threshold
        if self.d_w is not None:
            # `empty_like` left garbage in rows that no block visited: reserved rows, and all rows without tokens
            self.d_w[self.head.rows if len(self.x) else 0 :].zero_()
        if self.d_bias is not None and bias is not None:
            d_bias = self.d_bias.to(bias.dtype)
        if self.d_gap is not None:
            d_threshold = -(self.d_gap if threshold.ndim else self.d_gap.sum()).to(threshold.dtype)
        d_u = [self.d_u[i].to(self.u.loc.dtype) if self.need[i] and self.d_u is not None else None for i in (0, 1)]
        return *d_u, self.d_w, d_bias, d_threshold


def _spread(d: Sequence[Tensor], by: Sequence[Tensor], into: Sequence[Tensor] | Tensor, add: bool) -> None:
    """into_k = d_k by_k, or +=, for location and scale."""
    for one, other, out in zip(d, by, into, strict=True):
        mm_into(one, other, out, add)


def ovr_one_pass(u: Cauchy, head: WordHead, targets: Targets, maths: TileMaths) -> OvrOutput:
    """The loss with gradients computed in forward; under no_grad only the loss. Memory: O(N C) and a few tiles.

    head: must have start 0.
    """
    leaves = (*u, head.weight, head.bias, head.threshold)
    if not torch.is_grad_enabled() or not any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return visit(u, head, targets, Needs(), maths)[0]
    return OvrOutput(*_OnePass.apply(*leaves, head.used_rows, targets, maths))


class _OnePass(torch.autograd.Function):
    """Forward computes loss and gradients. Backward multiplies these in place by the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        loc_u: Tensor,
        scale_u: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        threshold: Tensor,
        used_rows: int | None,
        targets: Targets,
        maths: TileMaths,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        ctx.save_for_backward(loc_u, scale_u, weight, bias, threshold)
        ctx.used_rows, ctx.targets, ctx.maths = used_rows, targets, maths
        head = WordHead(weight, bias, threshold, used_rows=used_rows)
        sums, ctx.gradients = visit(Cauchy(loc_u, scale_u), head, targets, Needs(*ctx.needs_input_grad[:5]), maths)
        ctx.mark_non_differentiable(*(s for s in (sums.per_token, sums.prob_sum, sums.nll) if s is not None))
        return sums.loss, sums.per_token, sums.prob_sum, sums.nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        loc_u, scale_u, weight, bias, threshold = ctx.saved_tensors  # raises if the graph was freed
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # second backward on a retained graph: autograd owns the first gradients, so recompute
            head = WordHead(weight, bias, threshold, used_rows=ctx.used_rows)
            need = Needs(*ctx.needs_input_grad[:5])
            _, gradients = visit(Cauchy(loc_u, scale_u), head, ctx.targets._replace(seen=None), need, ctx.maths)
        if upstream.is_cuda or float(upstream) != 1.0:  # on a GPU reading the scalar would synchronise, so multiply
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(upstream)
        return *gradients, None, None, None


def _at(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _cut(buffers: Tensor, a: int, b: int, multiple: int = 1) -> Tensor:
    """View [count, a, b] of buffers [count, size]; rows start at multiples of `multiple` elements."""
    stride = -(-b // multiple) * multiple
    return buffers[:, : a * stride].unflatten(1, (a, stride))[..., :b]
