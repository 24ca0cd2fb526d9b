"""SUMMA: products of matrices that lie in blocks on a square grid of ranks, one panel after the other.

Rank (i, j) of q x q holds block (i, j) of every matrix. A B, A B^T and A^T B each take q steps. A step
brings in one panel of blocks by broadcasts along the grid's rows or columns, multiplies, and adds up on the
spot or by a reduce; while it multiplies, the next step's broadcast and the last one's reduce are under way.
The gradients of one product are the other two.

Source: van de Geijn and Watts 1997, "SUMMA: Scalable universal matrix multiplication algorithm"; as layers:
Xu et al. 2021 (arXiv:2104.05343), section 3; with depth: Wang et al. 2021 (arXiv:2105.14500), section 3.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import Group, group_of, group_rank, group_size
from tpcourse.layers.linear import autocast


@dataclass(frozen=True)
class Grid:
    """The groups of this rank: `rows` are the q ranks of its column of the grid, `columns` those of its row.

    `depth`: the d ranks that hold the same block of B in d such grids, with other rows of A; None for one.
    `tokens`: the q d ranks of `rows` and `depth`, row by row: those that hold other rows of A, same columns.
    `ranks`: all of them.
    """

    rows: Group
    columns: Group
    depth: Group | None
    tokens: Group
    ranks: Group

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Grid":
        """Of a mesh q x q or q x q x d: its dimensions are rows, columns and depth.

        Every rank of the mesh calls this. Raises ValueError if there are other dimensions or they have no
        names, or if there are not as many rows as columns.
        """
        names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
        if names is None or len(shape) not in (2, 3):
            raise ValueError("a grid is a mesh of 2 named dimensions, rows and columns, or of 3 with depth, "
                             f"not {names} of shape {shape}")
        if shape[0] != shape[1]:
            raise ValueError(f"mesh dimension {names[0]!r} has {shape[0]} ranks and {names[1]!r} has "
                             f"{shape[1]}; SUMMA's grid has as many rows as columns")
        rows, columns = mesh[names[0]], mesh[names[1]]
        if shape[2:] in ((), (1,)):
            return cls(rows, columns, None, rows, mesh._flatten())
        return cls(rows, columns, mesh[names[2]], mesh[names[0], names[2]]._flatten(), mesh._flatten())


Sizes = Sequence[int] | None
Product = Callable[[Tensor, Tensor, Grid, Sizes], Tensor]


def ab(a: Tensor, b: Tensor, grid: Grid, sizes: Sizes = None) -> Tensor:
    """C = A B: C_ij is the sum over t of A_it, broadcast along row i, times B_tj, broadcast along column j.

    a: [m / q, k / q], block A_ij. b: [k / q, n / q], block B_ij. Result: [m / q, n / q], block C_ij.
    A rank sends (q - 1) |A_ij| + (q - 1) |B_ij|, as all-gathers would, which hold q blocks at once, not two.
    `sizes`: k's blocks, if they are not equal. No gradient passes: see `multiply`.
    """
    c = None
    for a_t, b_t in zip(_panels(a, grid.columns, 1, sizes), _panels(b, grid.rows, 0, sizes)):
        c = a_t @ b_t if c is None else c.addmm_(a_t, b_t)
    return c


def abt(a: Tensor, b: Tensor, grid: Grid, sizes: Sizes = None) -> Tensor:
    """C = A B^T: C_it is the sum over row i of A_ij B_tj^T, where B_tj is broadcast along column j.

    a: [m / q, k / q], block A_ij. b: [n / q, k / q], block B_ij. Result: [m / q, n / q], block C_ij.
    `sizes`: n's blocks, if they are not equal. No gradient passes: see `multiply`.
    """
    return _sum_each((a @ b_t.mT for b_t in _panels(b, grid.rows, 0, sizes)), grid.columns)


def atb(a: Tensor, b: Tensor, grid: Grid, sizes: Sizes = None) -> Tensor:
    """C = A^T B: C_tj is the sum over column j of A_it^T B_ij, where A_it is broadcast along row i.

    a: [k / q, m / q], block A_ij. b: [k / q, n / q], block B_ij. Result: [m / q, n / q], block C_ij.
    `sizes`: m's blocks, if they are not equal. No gradient passes.
    """
    return _sum_each((a_t.mT @ b for a_t in _panels(a, grid.columns, 1, sizes)), grid.rows)


def multiply(x: Tensor, w: Tensor, grid: Grid, product: Product = ab, sizes: Sizes = None) -> Tensor:
    """`ab` or `abt` of x and w with their gradients: x has other tokens at each depth, w is the same at all.

    Kept for backward are this rank's blocks of x and w and no panel; those are broadcast again. Backward
    starts the sum of dW over depth and computes dX while it is under way. A frozen w keeps no x, and so on.
    """
    return _Multiply.apply(*autocast(x, w), grid, product, sizes)


_GRADIENTS = {  # of A and of B, from dC
    ab: (lambda a, b, dc, *where: abt(dc, b, *where), lambda a, b, dc, *where: atb(a, dc, *where)),
    abt: (lambda a, b, dc, *where: ab(dc, b, *where), lambda a, b, dc, *where: atb(dc, a, *where)),
}


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, grid, product, sizes):
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, w if needs_dx else None)
        ctx.product, ctx.where = product, (grid, sizes)
        return product(x, w, grid, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, w), (grid, _) = ctx.saved_tensors, ctx.where
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        gradient_x, gradient_w = _GRADIENTS[ctx.product]
        dx = dw = summing = None
        if needs_dw:
            dw = gradient_w(x, w, dy, *ctx.where)
            if grid.depth is not None:
                summing = dist.all_reduce(dw, group=group_of(grid.depth), async_op=True)
        if needs_dx:
            dx = gradient_x(x, w, dy, *ctx.where)
        if summing:
            summing.wait()
        return dx, dw, None, None, None


def _panels(block: Tensor, group: Group, dim: int, sizes: Sizes) -> Iterator[Tensor]:
    """Every rank's block in turn, on all of them; the next is under way while the caller uses one."""
    size, block = group_size(group), block.contiguous()
    sizes = sizes or [block.size(dim)] * size
    coming = _start_broadcast(block, group, 0, dim, sizes[0])
    for t in range(size):
        panel, work = coming
        if t + 1 < size:
            coming = _start_broadcast(block, group, t + 1, dim, sizes[t + 1])
        if work:
            work.wait()
        yield panel


def _start_broadcast(block: Tensor, group: Group, src: int, dim: int,
                     size: int) -> tuple[Tensor, dist.Work | None]:
    """Rank src's block, which has `size` entries along `dim`, complete once the work is waited for."""
    if group_size(group) == 1:
        return block, None
    if group_rank(group) != src:
        block = block.new_empty([size if d == dim else n for d, n in enumerate(block.shape)])
    return block, dist.broadcast(block, group=group_of(group), group_src=src, async_op=True)


def _sum_each(parts: Iterable[Tensor], group: Group) -> Tensor:
    """Of the t-th part the sum over the group, on rank t; it is under way while the next part is computed."""
    own = work = None
    for t, part in enumerate(parts):
        if work:
            work.wait()
        if group_size(group) > 1:
            work = dist.reduce(part, group=group_of(group), group_dst=t, async_op=True)
        if t == group_rank(group):
            own = part
    if work:
        work.wait()
    return own
