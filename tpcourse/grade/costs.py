"""The tasks of lesson 08: what an MLP sends in three layouts, and the line through measured times."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpcourse import predict, schemes
from tpcourse.grade import linear
from tpcourse.grade.case import Case, bytes_text, odd
from tpcourse.measure import dry_run
from tpcourse.models import MLP

LAYOUTS = "1D", "1D+SP", "3D"
SAYS = {  # what a wrong value usually means
    "forward": "that is forward alone: backward sends as well",
    "all": "the share (P-1)/P is missing: a rank does not send itself what it has",
    "half": "that is half: backward sends as well, and an all-reduce costs twice what an all-gather does",
    "kept": "X is gathered again in backward, for dA: with split tokens no rank keeps all of it",
    "numbers": "those are numbers: each takes e bytes",
    "no hidden": "the hidden units are 4h: what passes between the linears is 4 times as wide",
    "no weights": "the weights are missing: on the cube they are gathered too, whatever the tokens",
    "only gathered": "the sums of Y are missing: they are scattered forward, and their gradients gathered",
    "share": "on the cube a collective runs over q ranks, so the share is (q-1)/q, not (P-1)/P",
    "whole": "a rank gathers 1/q² of the whole, not all of it",
    "own": "1/P is what a rank has; gathered it is 1/q² of the whole, and the ledger counts that",
    "unweighted": "that is the least absolute error, which the largest decides: divide each error by t",
    "wrong weights": "each error is divided by its time, then squared: rows are [1/t, S/t], the goal is 1",
    "swapped": "α comes first, then β",
    "bandwidth": "that is the bandwidth 1/β: β is the time for each further KiB",
    "no latency": "α is missing: the line need not go through zero",
    "smallest": "α is not the time of the smallest message, which has bytes to send as well",
}


def mlp_volume(n: int, rng: torch.Generator) -> list[Case]:
    """``mlp_volume(layout, n, h, P, e)`` in each of `LAYOUTS`, held against what a dry run sends."""
    q = int(torch.randint(2, 5, (), generator=rng))
    ranks = q**3
    e = (4, 8)[int(torch.randint(2, (), generator=rng))]
    sizes = {"n": ranks * odd(rng, 3, 9), "h": ranks * odd(rng, 1, 5), "P": ranks, "e": e}
    return [_volume_case(n, layout, q, **sizes) for layout in LAYOUTS]


def sent(layout: str, n: int, h: int, P: int, e: int) -> float:
    """What a dry run of the package's MLP, h to 4h to h without biases, sends on one rank."""
    q = round(P ** (1 / 3))
    mesh = dict.fromkeys("ijl", q) if layout == "3D" else {"tp": P}
    return float(dry_run(_mlp, layout, n, h, {4: torch.float32, 8: torch.float64}[e], mesh=mesh).book.total())


def _mlp(mesh: DeviceMesh, layout: str, n: int, h: int, dtype: torch.dtype) -> None:
    q = mesh.size(0)
    if layout == "3D":
        scheme, shares = schemes.ThreeD(mesh), predict.ThreeD(q, q, q).shares
    else:
        scheme = schemes.OneD(mesh["tp"], layout == "1D+SP")
        shares = predict.OneD(q, layout == "1D+SP").shares
    layer = MLP(scheme, h, 4 * h, bias=False).to(dtype)
    x = torch.empty(n // shares.outer_tokens, h // shares.outer_features, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.backward(torch.empty_like(y))


def _volume_case(ranks: int, layout: str, q: int, n: int, h: int, P: int, e: int) -> Case:
    right, wrong = sent(layout, n, h, P, e), _wrong_volumes(layout, q, n, h, P, e)
    arguments = {"layout": layout, "n": n, "h": h, "P": P, "e": e}
    mistakes = [(SAYS[name], [_number(value)] * ranks) for name, value in wrong if value != right]
    title = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    traffic = linear.limited(ranks, {"forward": 0}, lambda *_: "a formula needs no message", [], "")
    expected = [{"result": _number(right)}] * ranks
    settings, praise = {"arguments": arguments}, f"{bytes_text(right)}, as a dry run counts"
    said = {"result": mistakes}, traffic, praise
    return Case(title, ranks, "number", settings, [[]] * ranks, expected, *said)


def _wrong_volumes(layout: str, q: int, n: int, h: int, P: int, e: int) -> list[tuple[str, float]]:
    u = (P - 1) / P * n * h * e
    if layout == "1D":
        return [("half", 2 * u), ("all", 4 * n * h * e), ("numbers", 4 * u / e)]
    if layout == "1D+SP":
        return [("forward", 2 * u), ("kept", 4 * u), ("all", 5 * n * h * e), ("numbers", 5 * u / e)]
    x, a, y = 5 * n * h * e, 8 * h * h * e, 5 * n * h * e
    both = 2 * (q - 1) / q**3
    return [
        ("forward", both / 2 * (x + a + y)),
        ("no weights", both * (x + y)),
        ("only gathered", both * (x + a)),
        ("share", 2 * (P - 1) / P / q**2 * (x + a + y)),
        ("whole", 2 * (q - 1) / q * (x + a + y)),
        ("own", both / q * (x + a + y)),
        ("all", 2 / q**2 * (x + a + y)),
        ("no hidden", both * (4 * n * h * e + a)),
        ("numbers", both * (x + a + y) / e),
    ]


def alpha_beta(n: int, rng: torch.Generator) -> list[Case]:
    """``fit_alpha_beta(sizes, times)``: α in µs and β in µs per KiB, of the least relative error."""
    count = odd(rng, 7, 11)
    sizes = 2.0 ** torch.arange(count, dtype=torch.float64)
    alpha, beta = (low + torch.rand((), generator=rng).double() * more for low, more in ((20, 60), (0.3, 2)))
    noise = 0.2 * (torch.rand(count, generator=rng).double() - 0.5)
    times = (alpha + beta * sizes) * (1 + noise)
    right = _fit(sizes, times, 1 / times)
    through_zero = sizes.new_tensor([0.0, (sizes * times).sum() / (sizes * sizes).sum()])
    wrong = [
        ("unweighted", _fit(sizes, times, torch.ones_like(times))),
        ("wrong weights", _fit(sizes, times, times.rsqrt())),
        ("swapped", right.flip(0)),
        ("bandwidth", torch.stack([right[0], 1 / right[1]])),
        ("no latency", through_zero),
        ("no latency", sizes.new_tensor([0.0, (sizes / times).sum() / (sizes / times).square().sum()])),
        ("smallest", torch.stack([times[0], right[1]])),
    ]
    traffic = linear.limited(n, {"forward": 0}, lambda *_: "a fit needs no message", [], "")
    settings = {"names": ["sizes", "times"], "group": False, "options": {}}
    mistakes = {"result": [(SAYS[name], [value] * n) for name, value in wrong]}
    expected = {"result": right, "sizes after the call": sizes, "times after the call": times}
    mistakes |= {name: [(linear.SAYS["changed"], [])] for name in list(expected)[1:]}
    praise = f"α = {right[0]:.1f} µs, β = {right[1]:.3f} µs per KiB"
    title = f"{count} messages of 1 to {int(sizes[-1]):,} KiB"
    given = settings, [[sizes, times]] * n, [expected] * n
    return [Case(title, n, "function", *given, mistakes, traffic, praise, absolute=1e-9)]


def _fit(sizes: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """[alpha, beta] of the least sum of (weight * (alpha + beta size - time))²."""
    rows = torch.stack([weights, weights * sizes], 1)
    return torch.linalg.lstsq(rows, (weights * times)[:, None]).solution[:, 0]


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)
