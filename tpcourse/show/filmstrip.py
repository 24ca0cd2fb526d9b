"""A collective step by step, drawn from the simulator: a film strip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from tpcourse.show.blocks import card, ranks_text
from tpcourse.show.collectives import Cell, Frame, Simulation, simulate
from tpcourse.show.colours import FAINT, INK, PAPER, ink_on, rank_colour
from tpcourse.show.figure import Drawing, Picture, canvas, write

WIDTH = 9.4  # inches that a strip may take
WRITTEN = 4  # a sum of more terms is not written out
ROW, GUTTER, TERM = 0.3, 0.28, 0.2  # inches: a cell's height, the room between two ranks, the width of a term
HEAD, CAPTION, FOOT, SIDE = 0.75, 0.62, 0.16, 0.3  # inches: above the strip; over, under, beside cells


def collective(name: str, ranks: int = 4, between: bool = True) -> FilmStrip:
    """What each rank holds before, between and after the steps of a collective; arrows say what moves next.

    Args:
        name: broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_reduce, all_to_all,
            send_recv or ring_shift.
        ranks: how many take part.
        between: False leaves out what is between the first frame and the last.

    Each rank is a column. A cell `b2` is rank 2's data for chunk b, in rank 2's colour; a sum shows the
    colours of all its terms. all_gather, reduce_scatter and all_reduce go round a ring, broadcast and reduce
    along a chain. What each rank sends equals `tpcourse.measure.wire_bytes`.
    """
    return FilmStrip(simulate(name, ranks), between)


@dataclass(repr=False)
class FilmStrip(Drawing):
    """A simulated collective as one figure; see `collective`."""

    simulation: Simulation
    between: bool = True

    @property
    def title(self) -> str:
        return f"{self.simulation.name} on {self.simulation.ranks} rank{'s' * (self.simulation.ranks != 1)}"

    @property
    def summary(self) -> str:
        """Steps, and what each rank sends."""
        steps, sent = len(self.simulation.frames) - 1, self.simulation.sent()
        senders = {part: [rank for rank, own in enumerate(sent) if own == part] for part in sent}
        names = ["each rank"] if len(senders) == 1 else map(ranks_text, senders.values())
        who = ", by ".join(f"{name}: {_amount(part)}" for name, part in zip(names, senders))
        sums = any(len(cell) > 1 for slots in self.frames[-1].holds for cell in slots)
        return f"{steps} step{'s' * (steps != 1)}. Sent by {who}." + " Stripes in a cell are a sum." * sums

    @property
    def alt(self) -> str:
        lines = [self.summary]
        for frame in self.frames:
            lines.append(f"{frame.caption}: " + " | ".join(
                " ".join(cell_text(cell) for cell in slots) for slots in frame.holds))
        return "\n".join(lines)

    @property
    def frames(self) -> tuple[Frame, ...]:
        frames = self.simulation.frames
        if self.between or len(frames) < 3:
            return frames
        return (replace(frames[0], moves=()), frames[-1])

    @property
    def cell_width(self) -> float:
        """Inches that the longest sum in a cell wants."""
        terms = max(len(cell) for frame in self.frames for slots in frame.holds for cell in slots)
        return max(0.42, TERM * min(terms, WRITTEN))

    @property
    def frame_size(self) -> tuple[float, float]:
        """Inches across and down of one frame."""
        ranks, slots = self.simulation.ranks, len(self.frames[0].holds[0])
        columns = ranks * (self.cell_width + GUTTER) - GUTTER
        captions = 0.087 * max(len(frame.caption) for frame in self.frames)
        return max(columns, captions) + 2 * SIDE, CAPTION + slots * ROW + FOOT

    def figure(self) -> Figure:
        width, height = self.frame_size
        lines = math.ceil(len(self.frames) / max(1, int(WIDTH / width)))
        columns = math.ceil(len(self.frames) / lines)
        figure, axes = canvas(max(columns * width, 0.075 * len(self.summary) + SIDE), HEAD + lines * height)
        write(axes, SIDE, 0.3, self.title, size=11.5, weight="bold", ha="left")
        write(axes, SIDE, 0.57, self.summary, color=FAINT, ha="left")
        for index, frame in enumerate(self.frames):
            self._draw(axes, frame, index % columns * width + SIDE, HEAD + index // columns * height)
        return figure

    def reel(self) -> Picture:
        """All frames below each other, each `frame_size` tall: what the slider moves past a window."""
        width, height = self.frame_size
        figure, axes = canvas(width, height * len(self.frames))
        for index, frame in enumerate(self.frames):
            self._draw(axes, frame, SIDE, index * height)
        return Picture(self.title, self.alt, figure)

    def _draw(self, axes: Axes, frame: Frame, x: float, y: float) -> None:
        wide = self.cell_width
        moving = {(move.source, move.slot) for move in frame.moves}
        write(axes, x, y + 0.21, frame.caption, weight="bold", ha="left")
        y += CAPTION
        for rank, slots in enumerate(frame.holds):
            left = x + rank * (wide + GUTTER)
            write(axes, left + wide / 2, y - 0.18, f"rank {rank}", size=9)
            axes.add_artist(card((left, y - 0.08), wide, 0.06, rank))
            for slot, cell in enumerate(slots):
                _cell(axes, cell, (left, y + slot * ROW), wide, (rank, slot) in moving)
        self._arrows(axes, frame, x, y)

    def _arrows(self, axes: Axes, frame: Frame, x: float, y: float) -> None:
        ranks, wide = self.simulation.ranks, self.cell_width
        ring = len(frame.moves) == ranks  # everyone sends: the last rank's right neighbour is the first
        for move in frame.moves:
            start = x + move.source * (wide + GUTTER), y + (move.slot + 0.5) * ROW
            end = x + move.target * (wide + GUTTER), y + (move.to_slot + 0.5) * ROW
            far = abs(move.source - move.target) > 1
            if ring and move.source - move.target == ranks - 1 > 1 and move.slot == move.to_slot:
                _arrow(axes, (start[0] + wide, start[1]), (start[0] + wide + 0.26, start[1]))
                _arrow(axes, (end[0] - 0.26, end[1]), end)
            elif move.source < move.target:
                _arrow(axes, (start[0] + wide, start[1]), end, 0.2 * far * (move.slot != move.to_slot))
            else:
                _arrow(axes, start, (end[0] + wide, end[1]), -0.2 * far * (move.slot != move.to_slot))


def _amount(part: Fraction) -> str:
    return {0: "nothing", 1: "one message"}.get(part, f"{part} of a message")


def cell_text(cell: Cell) -> str:
    """A sum as text: "a0+a1", or "-" for nothing."""
    return "+".join(f"{chr(ord('a') + chunk)}{rank}" for chunk, rank in cell) or "-"


def _cell(axes: Axes, cell: Cell, at: tuple[float, float], width: float, moving: bool) -> None:
    """One stripe for each term of the sum; the term is written in it where there is room."""
    (x, y), stripe = at, width / max(1, len(cell))
    for index, (chunk, rank) in enumerate(cell):
        axes.add_artist(card((x + index * stripe, y), stripe, ROW, rank))
        if len(cell) <= WRITTEN:
            term = cell_text(((chunk, rank),))
            _label(axes, x + (index + 0.5) * stripe, y + ROW / 2, term, rank_colour(rank))
    if len(cell) > WRITTEN:
        _label(axes, x + width / 2, y + ROW / 2, "Σ" + cell_text(cell)[0], PAPER)
    axes.add_artist(Rectangle(at, width, ROW, fill=False, edgecolor=INK if moving else "#C8C8C8",
                             linewidth=1.6 if moving else 0.7, zorder=3 if moving else 2))


def _label(axes: Axes, x: float, y: float, text: str, paper: str) -> None:
    patch = dict(facecolor=paper, edgecolor="none", pad=0.5)
    write(axes, x, y, text, size=8.5, color=ink_on(paper), zorder=5, bbox=patch)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0) -> None:
    axes.add_artist(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, linewidth=1.3, color=INK,
                                   shrinkA=1, shrinkB=1, zorder=4, connectionstyle=f"arc3,rad={bend}"))
