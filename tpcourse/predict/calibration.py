"""A machine as it was measured: what calibrate found, as a Machine, and on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tpcourse.measure import Row, fit_alpha_beta
from tpcourse.predict.work import OPTIMIZER


@dataclass(frozen=True)
class Calibration:
    """What one of `gpus` ranks, all at work at once, takes for everything; a `Machine`.

    `e`: bytes of the numbers that were multiplied. `memory`: bytes that a rank has. `overlap`: see `Machine`.
    `products`: seconds of a product, and more for each of a batch, each operation and each byte.
    `kernels`: for each kind the bytes and seconds that were measured.
    `messages`: operation, ranks of a group, alpha (seconds) and beta (seconds a byte of the message).
    """

    gpus: int
    e: int
    memory: float
    overlap: float
    products: tuple[float, float, float, float]
    kernels: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    messages: tuple[tuple[str, int, float, float], ...]

    @property
    def node(self) -> int:
        """All are on one machine."""
        return self.gpus

    def product(self, n: int, k: int, m: int, e: int, batch: int = 1) -> float:
        """Seconds of [n, k] @ [k, m], `batch` times: a sum of what a call, a matrix, its flop and bytes take.

        Raises ValueError for numbers of other bytes than were multiplied.
        """
        if e != self.e:
            raise ValueError(f"numbers of {e} bytes, where the calibration is of {self.e}; pass e={self.e}, or "
                             f"calibrate with e={e}")
        return sum(a * b for a, b in zip(self.products, features(n, k, m, e, batch)))

    def kernel(self, kind: str, nbytes: float) -> float:
        """Seconds between those of the sizes measured, on logarithmic scales; beyond, in proportion to bytes.

        The optimizer's are affine in the bytes, as `Machine` wants them.

        Raises ValueError for a kind that was not measured.
        """
        if kind not in self._kernels:
            raise ValueError(f"no kernel {kind!r} was measured; there are {', '.join(self._kernels)}")
        if kind == OPTIMIZER:
            alpha, beta = self._optimizer
            return alpha + beta * nbytes
        sizes, seconds = self._kernels[kind]
        inside = min(max(nbytes, sizes[0]), sizes[-1])
        between = math.exp(np.interp(math.log(inside), np.log(sizes), np.log(seconds)))
        return between * max(1.0, nbytes / sizes[-1])

    def message(self, row: Row, here: int) -> float:
        """alpha for each call and beta for each byte of the messages.

        Raises ValueError for an operation, or a number of ranks, that was not measured.
        """
        if (row.op, row.group_size) not in self._messages:
            known = ", ".join(f"{op} of {size}" for op, size in self._messages) or "none, on one rank"
            raise ValueError(f"no {row.op} of {row.group_size} ranks was measured; there are {known}; calibrate on "
                             f"a multiple of {row.group_size} ranks")
        alpha, beta = self._messages[row.op, row.group_size]
        return alpha * row.calls + beta * row.message_bytes

    @cached_property
    def _kernels(self) -> Mapping[str, tuple[list[float], list[float]]]:
        return {kind: tuple(map(list, zip(*points))) for kind, points in self.kernels}

    @cached_property
    def _optimizer(self) -> tuple[float, float]:
        alpha, beta = fit_alpha_beta(*self._kernels[OPTIMIZER])
        return max(alpha, 0.0), max(beta, 0.0)

    @cached_property
    def _messages(self) -> Mapping[tuple[str, int], tuple[float, float]]:
        return {(op, size): (alpha, beta) for op, size, alpha, beta in self.messages}

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON, for `load`."""
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """What `save` wrote. Raises ValueError if the file is no calibration."""
        try:
            data = json.loads(Path(path).read_text())
            found = cls(**data | {name: _tuples(data[name]) for name in ("products", "kernels", "messages")})
            found._check()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no calibration ({type(error).__name__}: {error}); write one with "
                             "tp.calibrate(ranks, path)") from None
        return found

    def _check(self) -> None:
        """Raises ValueError, with the numbers, for what no machine takes."""
        if self.gpus < 1 or self.e not in (2, 4, 8) or len(self.products) != 4 or min(self.products) < 0:
            raise ValueError(f"gpus={self.gpus}, e={self.e}, products={self.products}")
        if not 0 <= self.overlap <= 1 or self.memory <= 0:
            raise ValueError(f"overlap={self.overlap}, memory={self.memory}")
        wrong = [line for line in self.messages if len(line) != 4 or min(line[1:]) < 0]
        wrong += [kernel for kernel in self.kernels if not kernel[1] or min(map(min, kernel[1])) <= 0]
        if wrong:
            raise ValueError(f"{wrong[0]}")


def features(n: int, k: int, m: int, e: int, batch: int = 1) -> tuple[int, int, int, int]:
    """What the seconds of a product depend on: calls, further matrices of its batch, flop and bytes."""
    return 1, batch - 1, batch * 2 * n * k * m, batch * e * (n * k + k * m + n * m)


def fit_products(shapes: list[tuple[int, int, int, int]], seconds: list[float], e: int) -> tuple[float, ...]:
    """The four numbers, none negative, with the least squares of the relative error.

    shapes: (n, k, m, batch) each.
    """
    rows = np.array([features(n, k, m, e, batch) for n, k, m, batch in shapes]) / np.array(seconds)[:, None]
    kept = list(range(4))
    while True:
        found = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    return tuple(float(found[kept.index(i)]) if i in kept else 0.0 for i in range(4))


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
