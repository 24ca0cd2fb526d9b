"""What a failing cell raises: one exception type per way in which ranks fail."""

import traceback


class RankError(RuntimeError):
    """Base of every error that comes from running on ranks; the message is written to be read by a person.

    ``ranks`` lists the ranks that are to blame, where that is known.
    """

    def __init__(self, message: str, ranks: list[int] | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks or []

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message alone, without the frames of this package."""
        return [f"{type(self).__name__}: {self}"]


def show_without_frames(error: BaseException) -> None:
    """Let IPython show an exception by its message alone, without the frames of this package."""
    error._render_traceback_ = lambda: [line.rstrip("\n") for line in traceback.format_exception_only(error)]


class RankRaised(RankError):
    """The function raised on a rank. ``error_type`` is the name of the original exception's type."""

    def __init__(self, message: str, ranks: list[int] | None = None, error_type: str = "") -> None:
        super().__init__(message, ranks)
        self.error_type = error_type


class RankDied(RankError):
    """A rank's process ended in the middle of the work: killed, crashed, or left with exit()."""


class CollectiveMismatch(RankError):
    """Ranks called different collectives, or the same one with shapes, dtypes, operations or roots that do not fit."""


class RanksStuck(RankError):
    """Ranks wait for something that will not come, or ran past the timeout."""


class WorldClosed(RankError):
    """The world was used after it was closed or had failed."""


class Unsendable(RankError, TypeError):
    """A function, argument or result cannot be sent between the parent and the ranks."""
