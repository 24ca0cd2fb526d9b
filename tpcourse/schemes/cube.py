"""One linear layer on three mesh dimensions, of which column, row and fully sharded layers are faces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tpcourse.comm import (Group, all_gather, copy_to_region, describe, even_sizes, group_rank, group_size,
                           my_slice, reduce_scatter, split_sizes)
from tpcourse.layers.layout import Layout, Piece, check_shared, keep_own
from tpcourse.layers.linear import autocast, leave_region, start_gather, start_sum
from tpcourse.layers.vocabulary import own_entries


@dataclass(frozen=True)
class Axes:
    """The three mesh dimensions as one linear uses them; the next one swaps `enter` and `leave`.

    `storage`, i: tokens, and the rows of a weight once more. `enter`, j: output features. `leave`, l: input
    features. With `scatter` tokens are also split over `enter` before the linear and over `leave` after it;
    else they are the same on all ranks there. With `keep` what is gathered is kept for backward; else it is
    gathered again.
    """

    storage: Group
    enter: Group
    leave: Group
    scatter: bool
    keep: bool

    def swapped(self) -> "Axes":
        """Those of the linear that takes this one's result."""
        return replace(self, enter=self.leave, leave=self.enter)


def enter_tokens(x: Tensor, axes: Axes) -> Tensor:
    """[tokens / i, ...] of [tokens / (i j), ...]; without `scatter` they are there already."""
    return all_gather(x, axes.enter, 0) if axes.scatter else copy_to_region(x, axes.enter)


def gather_stored(parameter: Tensor, axes: Axes, rows: int) -> Tensor:
    """The block of `rows` rows of which each rank of `storage` stores a part."""
    return all_gather(parameter, axes.storage, 0, split_sizes(rows, group_size(axes.storage)))


def cube_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axes: Axes, rows: int) -> Tensor:
    """Y = X W^T + b, which is

        x, w = enter_tokens(x, axes), gather_stored(weight, axes, rows)
        return leave_region(F.linear(x, w), bias, axes.leave, axes.scatter)

    and differs from it in time and memory: backward computes dW while dX is summed, and without `keep` it
    gathers W again and, while dX is computed, X. A frozen W keeps no X; if X needs no gradient, no dX is
    computed.

    X: [tokens / (i j), in / l]. W: [out / (j i), in / l] and b: [out / (j i)]: each rank of `storage` has its
    part of the `rows` = out / j rows, as evenly as can be. Y: [tokens / (i l), out / j].
    Without `scatter`, X: [tokens / i, in / l], the same on all of `enter`, and Y: [tokens / i, out / j], the
    same on all of `leave`.
    Source: Bian et al. 2021, arXiv:2105.14450, section 3.
    """
    x, weight, bias = autocast(x, weight, bias)
    bias = None if bias is None else gather_stored(bias, axes, rows)  # [out / j]
    if group_size(axes.leave) == 1:
        return _Product.apply(x, weight, bias, axes, rows)
    y = _Product.apply(x, weight, None, axes, rows)  # [tokens / i, out / j], a part of the sum over l
    return leave_region(y, bias, axes.leave, axes.scatter)  # [tokens / (i l), out / j]


class _Product(torch.autograd.Function):
    """What comes before the sum over `leave`: its terms, [tokens / i, out / j]."""

    @staticmethod
    def forward(ctx, x, weight, bias, axes, rows):
        ctx.axes, ctx.rows = axes, rows
        whole_x = enter_tokens(x, axes)  # [tokens / i, in / l]
        whole_weight = gather_stored(weight, axes, rows)  # [out / j, in / l]
        kept = (whole_x, whole_weight) if axes.keep else (x, weight)
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(kept[0] if needs_dw else None, kept[1] if needs_dx else None)
        return F.linear(whole_x, whole_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), axes = ctx.saved_tensors, ctx.axes
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = summing = gathering = None
        if needs_dw and axes.scatter and not axes.keep:
            x, gathering = _start(start_gather, x, axes.enter)
        if needs_dx:
            weight = weight if axes.keep else gather_stored(weight.detach(), axes, ctx.rows)
            dx, summing = _start(start_sum, dy @ weight, axes.enter, axes.scatter)
        if gathering:
            gathering.wait()
        if needs_dw:
            dw = reduce_scatter(dy.t() @ x, axes.storage, 0, split_sizes(ctx.rows, group_size(axes.storage)))
        if needs_db:
            db = dy.sum(0)
        if summing:
            summing.wait()
        return dx, dw, db, None, None


def _start(collective: Callable, x: Tensor, group: Group, *args: object) -> tuple[Tensor, dist.Work | None]:
    """What the collective makes of x, and the work to wait for; x itself in a group of one."""
    return (x, None) if group_size(group) == 1 else collective(x, group, *args)


class CubeLinear(nn.Module):
    """Y = X W^T + b on three mesh dimensions, entering and leaving by those that `axes` names.

    X: [tokens / (i j), in_features / l]. Y: [tokens / (i l), out_features / j]. Without `scatter` tokens are
    split over `storage` only, and X is the same on all of `enter`, Y on all of `leave`.
    Per rank: weight [R_i, in_features / l] and bias [R_i], where R_1 + R_2 + ... over `storage` are the rows
    that make this rank's outputs. `rows` says which those are, in one span or several, such as those of its
    gate and its up projection; `owned`, which of them are its own if other ranks compute them too.
    `weight` is a parameter to share instead of an own one.

    The layer draws the whole weight as nn.Linear does and keeps its part, as all layers of this scheme do.

    Raises ValueError if `leave` does not divide in_features, this rank's rows are fewer than the ranks of
    `storage`, or `weight` has another shape; in forward, if X has other features, or tokens that `leave` does
    not divide.
    Source: Bian et al. 2021, arXiv:2105.14450, section 3.
    """

    def __init__(self, in_features: int, out_features: int, axes: Axes, rows: Sequence[slice],
                 bias: bool = True, *, owned: Sequence[bool] | None = None,
                 weight: nn.Parameter | None = None) -> None:
        super().__init__()
        even_sizes(in_features, axes.leave, f"in_features={in_features}")
        self.in_features, self.out_features, self.axes = in_features, out_features, axes
        self.spans, self.owned = rows, owned or [True] * len(rows)
        self.rows = sum(span.stop - span.start for span in rows)
        keep_own(self, self.layouts(), nn.Linear(in_features, out_features, bias))
        if weight is not None:
            self.weight = check_shared(weight, self.weight, describe_axes(axes))

    def layouts(self) -> dict[str, Layout]:
        """Which block of the whole weight and entries of the whole bias this rank holds."""
        first = group_rank(self.axes.leave) == 0  # the bias is the same on all of them
        columns = my_slice(self.in_features, self.axes.leave)
        shape = (self.out_features, self.in_features)
        return {"weight": stored(shape, self.spans, self.owned, self.axes.storage, columns),
                "bias": stored(shape[:1], self.spans, [first and o for o in self.owned], self.axes.storage)}

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens / (i j), in_features / l]."""
        self._check(x)
        return cube_linear(x, self.weight, self.bias, self.axes, self.rows)

    def _check(self, x: Tensor) -> None:
        expected = self.weight.size(1)
        if x.dim() != 2 or x.size(1) != expected:
            raise ValueError(f"x has shape {tuple(x.shape)}, not (tokens, {expected}), for "
                             f"in_features={self.in_features} over {describe(self.axes.leave)}; pass this "
                             "rank's features")
        if self.axes.scatter:
            check_leaving(x.size(0) * group_size(self.axes.enter), self.axes)

    def extra_repr(self) -> str:
        return (f"{self.in_features} to {self.out_features} features, bias={self.bias is not None}, "
                f"{describe_axes(self.axes)}")


def stored(shape: Sequence[int], spans: Sequence[slice], owned: Sequence[bool], storage: Group,
           columns: slice | None = None) -> Layout:
    """This rank's share, over `storage`, of the rows in `spans` one after the other, and of these `columns`.

    Raises ValueError if there are fewer rows than ranks of `storage`.
    """
    total = sum(span.stop - span.start for span in spans)
    own = own_entries(total, storage, f"a block of {total} rows of {tuple(shape)}")
    pieces, start = [], 0
    for span, is_owned in zip(spans, owned):
        stop = start + span.stop - span.start
        low, high = max(own.start, start), min(own.stop, stop)  # what of the span is this rank's
        if low < high:
            here = (slice(low - own.start, high - own.start),)
            there = (slice(span.start + low - start, span.start + high - start),)
            if columns is not None:
                here, there = (*here, slice(0, columns.stop - columns.start)), (*there, columns)
            pieces.append(Piece(here, there, is_owned))
        start = stop
    return Layout(tuple(shape), tuple(pieces))


def own_words(n: int, over: Group, storage: Group, what: str) -> range:
    """This rank's entries of a vocabulary of n dealt over `over`; the rows of a table that `storage` stores.

    Raises ValueError, starting with `what`, if there are fewer entries than ranks.
    """
    ranks = group_size(over) * group_size(storage)
    if n < ranks:
        raise ValueError(f"{what} is less than {describe(over)} times {describe(storage)}, and each needs an "
                         f"entry; pad to {ranks} or use fewer ranks")
    return own_entries(n, over, what)


def check_leaving(tokens: int, axes: Axes) -> None:
    """Raises ValueError if a rank of `storage` has tokens that do not split over `leave`."""
    even_sizes(tokens, axes.leave, f"the share of {describe(axes.storage)}, {tokens} tokens each,")


def describe_axes(axes: Axes) -> str:
    """The axes as error messages name them."""
    return ", ".join(f"{role} {describe(getattr(axes, role))}" for role in ("storage", "enter", "leave"))
