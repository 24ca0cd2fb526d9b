"""Seconds of a step: what a rank computes, and what it sends, less what it sends while it computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tpcourse.measure import Row, Table
from tpcourse.predict.machine import Machine
from tpcourse.predict.model import Transformer
from tpcourse.predict.shares import check
from tpcourse.predict.two_d import TwoD
from tpcourse.predict.volume import Formulas, volume
from tpcourse.predict.work import SUM, Linear, Product, Work, forward_work, recomputed_work


@dataclass(frozen=True)
class Time:
    """Seconds on one rank: in matrix products, in everything else that is computed, and in messages.

    `hidden`: those of the messages that pass while products are computed.
    """

    matmul: float
    elementwise: float
    messages: float
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """One after the other, but for what is hidden."""
        return self.matmul + self.elementwise + self.messages - self.hidden


def step_time(model: Transformer, scheme: Formulas, machine: Machine, batch: int, sequence: int | None = None,
              *, e: int = 2, recompute: str = "none", sent: dict[str, Table] | None = None) -> dict[str, Time]:
    """Forward, backward and recomputation of `batch` sequences, for each part of the model, as in `volume`.

    seconds = products + other kernels + messages - what is hidden. Ranks fill the nodes in order, the mesh's
    last dimension first. The optimizer's step is not in it. `sent`: what `volume` says, where it is known.

    Raises ValueError as `volume` does.
    """
    sequence = sequence or model.context
    check(model, scheme.shares, batch, sequence, recompute)
    work = forward_work(model, scheme, batch, sequence, e)
    again = recomputed_work(work, model, scheme, recompute)
    sent = sent or volume(model, scheme, batch, sequence, e=e, recompute=recompute)
    seconds = _Seconds(scheme, machine, e)
    return {part: seconds.of(own, again.get(part, Work()), sent[part].rows) for part, own in work.items()}


@dataclass(frozen=True)
class _Seconds:
    """What work takes on a machine, in numbers of e bytes."""

    scheme: Formulas
    machine: Machine
    e: int

    def of(self, own: Work, again: Work, rows: list[Row]) -> Time:
        """Forward and backward of `own`, and a second forward of `again`."""
        matmul = own.layers * sum(map(self._three, own.products)) + again.layers * self._products(again.products)
        kernel = self.machine.kernel
        other = sum(own.layers * (kernel(k.kind, k.nbytes) + kernel(f"{k.kind} backward", 2 * k.nbytes))
                    for k in own.kernels) + again.layers * sum(kernel(k.kind, k.nbytes) for k in again.kernels)
        other += kernel(SUM, own.summed) if own.summed else 0
        hidden = own.layers * sum(self._hidden(linear, linear in again.linears) for linear in own.linears)
        return Time(matmul, other, self._messages(rows), hidden)

    def _three(self, product: Product) -> float:
        return self._products([product, product.to_inputs, product.to_weights])

    def _products(self, products: Iterable[Product]) -> float:
        return sum(p.count * self.machine.product(p.n, p.k, p.m, self.e, p.batch) for p in products)

    def _messages(self, rows: Iterable[Row]) -> float:
        return sum(self.machine.message(row, ranks_in_node(row, self.scheme, self.machine)) for row in rows)

    def _hidden(self, linear: Linear, twice: bool) -> float:
        """What a linear sends while it multiplies: the shorter of the two, as far as the machine does both.

        Backward sums dX while it computes dW and, where X is gathered once more, gathers while it computes dX.
        """
        if not self.machine.overlap:
            return 0.0
        if isinstance(self.scheme, TwoD):
            return self._hidden_panels(linear, twice)
        seconds = 0.0
        for row in linear.rows:
            if row.phase == "backward" and row.dim == linear.enters:
                behind = linear.product.to_inputs if row.op == "all_gather" else linear.product.to_weights
                seconds += min(self._messages([row]), self._products([behind]))
        return self.machine.overlap * seconds

    def _hidden_panels(self, linear: Linear, twice: bool) -> float:
        """SUMMA brings in the next panel, and adds up the last one, while it multiplies: q - 1 times of q.

        The sum of dW over depth passes while dX is computed.
        """
        product, share = linear.product, 1 - 1 / linear.product.count
        seconds = 0.0
        for phase, products in (("forward", (1 + twice) * [product]),
                                ("backward", [product.to_inputs, product.to_weights])):
            rows = [row for row in linear.rows if row.phase == phase]
            panels = (1 + (twice and phase == "forward")) * share * self._messages(
                row for row in rows if row.op in ("broadcast", "reduce"))
            depth = self._messages(row for row in rows if row.dim == self.scheme.depth.name)
            seconds += min(panels + depth, self._products(products))
        return self.machine.overlap * seconds


def ranks_in_node(row: Row, scheme: Formulas, machine: Machine) -> int:
    """How many of a group's ranks lie in one node: nodes take the mesh's fastest dimensions first."""
    dim = scheme.heads if row.dim == "kv_copies" else row.dim  # these are consecutive ranks of that dimension
    stride, here = 1, 1
    for name, size in reversed(scheme.mesh.items()):
        if dim == "world" or f"_{name}_" in f"_{dim}_":
            here *= min(size, max(1, machine.node // stride))
        stride *= size
    return min(here, row.group_size)
