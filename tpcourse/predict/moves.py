"""What a change of layout sends: the blocks that ranks lack."""

from tpcourse.comm.placement import Placement, share_sent
from tpcourse.measure import Row


def moved(source: Placement, target: Placement, n: int, h: int, e: int, rank: int | None = None) -> list[Row]:
    """The all-to-all of an activation [n, h] of e bytes a number, and that of its gradient, which goes back.

    Of `rank`, or without one the most that any rank sends each way. None where no rank lacks anything.
    Raises ValueError as `to_send` does.
    """
    rows, ranks = [], len(source.tokens)
    for phase, one, other in (("forward", source, target), ("backward", target, source)):
        shares = share_sent(one, other)
        if not max(shares):  # all have what they need: there is no message
            continue
        size = round(n * h * (max(shares) if rank is None else shares[rank])) * e
        rows.append(Row("all_to_all", "world", ranks, 1, size, size, phase))
    return rows
