"""What ranks print: kept per rank, shown in rank order with equal outputs merged, live where a person is watching."""

import sys
import time

HEAD_BYTES, TAIL_BYTES = 20_000, 10_000
LIVE_AFTER_S, LIVE_EVERY_S = 0.5, 0.25


class Tape:
    """One rank's output: its first and last part, however much it prints."""

    def __init__(self) -> None:
        self.head, self.tail, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:
            self.left_out += len(self.tail) - TAIL_BYTES
            del self.tail[:-TAIL_BYTES]

    def take_lines(self) -> str:
        """Hand over the complete lines so far, and keep only what follows them."""
        whole, newline, rest = bytes(self.tail or self.head).rpartition(b"\n")
        if not newline:
            return ""
        taken = Tape()
        taken.head, taken.left_out = (self.head, self.left_out) if self.tail else (bytearray(whole), 0)
        taken.tail = bytearray(whole) if self.tail else taken.tail
        self.head, self.tail, self.left_out = bytearray(rest), bytearray(), 0
        return taken.text()

    def text(self) -> str:
        """The output as a terminal would leave it: what a carriage return overwrote is gone."""
        gap = f"\n... {_size(self.left_out)} left out here ...\n".encode() if self.left_out else b""
        lines = (self.head + gap + self.tail).decode(errors="replace").replace("\r\n", "\n").split("\n")
        return "\n".join(_overwritten(line) for line in lines).rstrip()


def _overwritten(line: str) -> str:
    """One line after its carriage returns: a later piece covers the start of an earlier one."""
    shown = ""
    for piece in line.split("\r"):
        shown = piece + shown[len(piece):]
    return shown.rstrip()


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def name_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"; [3] as "rank 3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(spans)


def merged(texts: list[str]) -> str:
    """Every rank's text under its label, in rank order, equal ones once; further lines stay aligned under the first."""
    same: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            same.setdefault(text, []).append(rank)
    blocks = []
    for text, ranks in same.items():
        label = f"[{name_ranks(ranks)}] "
        blocks.append(label + text.replace("\n", "\n" + " " * len(label)))
    return "\n".join(blocks)


class Screen:
    """Shows the tapes: live while a long job runs and somebody watches, and once more, complete, at its end."""

    def __init__(self, tapes: list[Tape]) -> None:
        self.tapes = tapes
        self.shell = _shell()
        self.next = time.monotonic() + LIVE_AFTER_S
        self.handle = None
        self.shown = ""

    def refresh(self) -> None:
        """Show what there is so far; called often, does something a few times a second."""
        if time.monotonic() < self.next or (self.shell and not _watched(self.shell)):
            return
        self.next = time.monotonic() + LIVE_EVERY_S
        if self.shell:
            self._show(merged(["\n".join(tape.text().split("\n")[-12:]) for tape in self.tapes]))
        elif text := merged([tape.take_lines() for tape in self.tapes]):
            print(text, flush=True)

    def finish(self) -> None:
        """Show everything: one text output in a notebook (so that it is stored the same each time), print elsewhere."""
        text = merged([tape.text() for tape in self.tapes])
        if self.shell:
            self._show(text)
        elif text:
            print(text, flush=True)

    def _show(self, text: str) -> None:
        if text == self.shown:
            return
        self.shown = text
        data = {"text/plain": text}
        if self.handle is None:
            from IPython.display import display

            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)


def _shell():
    """The notebook's shell, or None outside of a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell if hasattr(shell, "kernel") else None


def _watched(shell) -> bool:
    """Whether a person watches: front ends that run notebooks unattended do not offer to answer input()."""
    return bool(shell) and bool(getattr(shell.kernel, "_allow_stdin", False))
