"""Who holds which block of a tensor, drawn: a block in its rank's colour, copies as cards in a pile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tpcourse.show.colours import FAINT, PAPER, ink_on, rank_colour, rank_hatch
from tpcourse.show.figure import Drawing, canvas, write
from tpcourse.show.layout import Layout, Range, Split, describe

# Inches.
MARGIN, GAP, HEAD, LINE = 0.2, 0.4, 0.5, 0.26  # around, between parts, above for titles, a line of text
PILE = 0.3  # how far a whole pile leans at most
ROOM, PILE_ROOM = (0.45, 0.64), (0.55, 0.95)  # height and width that the label of a card, or of a pile, wants


def blocks(layout: Layout | None = None, *, shape: Sequence[int] | None = None,
           mesh: dict[str, int] | None = None, split: Split | None = None, partial: str | tuple[str, ...] = (),
           title: str = "", rows: str = "", columns: str = "") -> Blocks:
    """A tensor cut into the blocks that its ranks hold; ranks with the same block show as a pile of cards.

    Args:
        layout: what a rank's `show.layout(dtensor)` returned, or `show.locate(full, parts)`; or instead
        shape, mesh, split: the tensor's shape, the mesh ({"dp": 2, "tp": 2}), and which tensor dimension is
            split over which mesh dimension(s) ({1: "tp"}), as `torch.tensor_split` does; what is not split is
            held by all.
        partial: the mesh dimension(s) along which ranks hold terms of a sum, each as large as the whole;
            marked with Σ.
        title: the tensor's name, as the text calls it.
        rows, columns: what the last two dimensions mean, such as "in_features k".

    A tensor of more than two dimensions shows as one panel for each block of the leading dimensions.

    Raises:
        ValueError: neither or both of a layout and shape with mesh, or a split that does not fit them.
    """
    if (layout is None) == (shape is None or mesh is None):
        raise ValueError("blocks needs either a layout, or shape= and mesh=")
    return Blocks(layout or describe(shape, mesh, split, partial), title, rows, columns)


def equation(parts: Sequence[Blocks | str]) -> Equation:
    """Tensors in a row with signs between them, to one scale: `show.equation([X, "·", A, "=", Y])`.

    Dimensions of equal size are drawn equally long, so that what a product contracts can be seen to match.
    What follows a line break in a sign is written small below it: "→\\nall-reduce".
    """
    return Equation(tuple(parts))


@dataclass(repr=False)
class Blocks(Drawing):
    """One tensor and who holds which block of it; see `blocks`."""

    layout: Layout
    title: str = ""
    rows: str = ""
    columns: str = ""

    def __post_init__(self):
        self.title = self.title or "tensor"

    @property
    def alt(self) -> str:
        lines = [f"{self.title}: {_times(self.layout.shape)} on mesh {_mesh(self.layout.mesh)}."]
        for block, ranks in self.layout.holders().items():
            inside = ", ".join(f"{start}:{stop}" for start, stop in block)
            lines.append(f"{ranks_text(ranks)}: [{inside}]")
        if self.layout.partial:
            lines.append(_sum(self.layout.partial))
        if self.layout.empty_ranks():
            lines.append(f"{ranks_text(self.layout.empty_ranks())}: nothing")
        return "\n".join(lines)

    def figure(self) -> Figure:
        return Equation((self,)).figure()

    def leads(self) -> list[tuple[Range, ...]]:
        """The distinct ranges of the dimensions before the last two, one panel for each."""
        return sorted({block[:-2] for block in self.layout.holders()}) or [()]


@dataclass(repr=False)
class Equation(Drawing):
    """Tensors and signs between them; see `equation`."""

    parts: tuple[Blocks | str, ...]

    @property
    def tensors(self) -> list[Blocks]:
        return [part for part in self.parts if isinstance(part, Blocks)]

    @property
    def title(self) -> str:
        return " ".join(part.split("\n")[0] if isinstance(part, str) else part.title for part in self.parts)

    @property
    def alt(self) -> str:
        return "\n".join(tensor.alt for tensor in self.tensors)

    def figure(self) -> Figure:
        lengths = _lengths(self.tensors)
        sizes = [(0.0, 0.0) if isinstance(part, str) else _extent(part, lengths) for part in self.parts]
        high = max(height for _, height in sizes)
        foot = LINE * max(len(_notes(tensor)) for tensor in self.tensors)
        wide = sum(width + GAP for width, _ in sizes) - GAP
        figure, axes = canvas(wide + 2 * MARGIN, HEAD + high + foot + MARGIN)
        x = MARGIN
        for part, (width, height) in zip(self.parts, sizes):
            if isinstance(part, str):
                sign, *caption = part.split("\n")
                write(axes, x, HEAD + high / 2, sign, size=20, weight="bold")
                write(axes, x, HEAD + high / 2 + LINE, "\n".join(caption), size=8.5)
            else:
                _draw(axes, part, lengths, x, HEAD + (high - height) / 2)
            x += width + GAP
        return figure


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: "rank 2", "ranks 0–3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}–{ranks[-1]}" if run else "ranks " + ", ".join(map(str, ranks))


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _sum(partial: Sequence[str]) -> str:
    return f"terms of a sum over {', '.join(partial)}"


def _mesh(mesh: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items())


def _plane(block: tuple[Range, ...]) -> tuple[Range, Range]:
    """The last two dimensions of a block; a vector counts as one row, a scalar as one element."""
    return ((0, 1), (0, 1), *block)[-2:]


def _lengths(tensors: Sequence[Blocks]) -> dict[int, float]:
    """Inches for each size of a dimension: to scale, but long enough for the labels of its blocks."""
    largest = max(size for tensor in tensors for size in (1, *tensor.layout.shape))
    longest = 3.4 if len(tensors) == 1 else 2.2
    lengths: dict[int, float] = {}
    for tensor in tensors:
        held = tensor.layout.holders()
        room = ROOM if all(len(ranks) == 1 for ranks in held.values()) else PILE_ROOM
        for axis, (_, size) in enumerate(_plane(_whole(tensor))):
            wanted = room[axis] * len({_plane(block)[axis] for block in held})
            lengths[size] = max(lengths.get(size, 0), longest * size / largest, wanted)
    return lengths


def _extent(tensor: Blocks, lengths: dict[int, float]) -> tuple[float, float]:
    """Inches across and down that the panels of a tensor take, its row label and title included."""
    (_, high), (_, wide) = _plane(_whole(tensor))
    panels = len(tensor.leads()) * (lengths[wide] + GAP) - GAP
    heading = 0.11 * len(tensor.title) + 0.09 * len(_times(tensor.layout.shape)) + 0.15
    return LINE * bool(tensor.rows) + max(panels, heading), lengths[high]


def _whole(tensor: Blocks) -> tuple[Range, ...]:
    return tuple((0, size) for size in tensor.layout.shape)


def _notes(tensor: Blocks) -> list[str]:
    """The lines under a tensor."""
    empty, partial = tensor.layout.empty_ranks(), tensor.layout.partial
    said = [tensor.columns, _sum(partial) if partial else "", f"{ranks_text(empty)}: nothing" if empty else ""]
    return [note for note in said if note]


def _draw(axes: Axes, tensor: Blocks, lengths: dict[int, float], x: float, y: float) -> None:
    """Title, labels and panels of one tensor, the panels' upper left corner at x (plus the row label), y."""
    width, height = _extent(tensor, lengths)
    write(axes, x + 0.08, y + height / 2, tensor.rows, rotation=90)
    left = x + LINE * bool(tensor.rows)
    write(axes, left, y - 0.1, tensor.title, size=11.5, weight="bold", ha="left", va="bottom")
    write(axes, x + width, y - 0.1, _times(tensor.layout.shape), color=FAINT, ha="right", va="bottom")
    (_, high), (_, wide) = _plane(_whole(tensor))
    for line, note in enumerate(_notes(tensor)):
        write(axes, (left + x + width) / 2, y + height + LINE * (line + 0.7), note)
    for lead in tensor.leads():
        _panel(axes, tensor, lead, left, y, lengths[wide] / wide, lengths[high] / high)
        left += lengths[wide] + GAP


def _panel(axes: Axes, tensor: Blocks, lead: tuple[Range, ...], x: float, y: float, across: float,
           down: float) -> None:
    """The blocks with the same leading ranges; an element is `across` x `down` inches."""
    for block, ranks in tensor.layout.holders().items():
        if block[:-2] == lead:
            (top, bottom), (start, stop) = _plane(block)
            elements = (bottom - top, stop - start)
            box = (x + start * across, y + top * down, elements[1] * across, elements[0] * down)
            label = _times([stop - start for start, stop in block])
            grid = elements if min(across, down) > 0.1 else (1, 1)
            _pile(axes, box, ranks, label, grid, "Σ " * bool(tensor.layout.partial))


def _pile(axes: Axes, box: tuple[float, float, float, float], ranks: Sequence[int], shape: str,
          elements: tuple[int, int], sign: str) -> None:
    """One card per rank that holds the block, the first in front, within the block's own place."""
    x, y, width, height = box
    widest, pile, part = (0.14, 0.56, 0.5) if sign else (0.08, PILE, 0.4)  # terms lean wider, for their plus
    lean = min(widest, pile / len(ranks), part * min(width, height) / len(ranks))
    width, height = width - lean * (len(ranks) - 1), height - lean * (len(ranks) - 1)
    for depth in reversed(range(len(ranks))):
        corner = (x + lean * depth, y + lean * (len(ranks) - 1 - depth))
        axes.add_artist(card(corner, width, height, ranks[depth]))
        if sign and depth:
            write(axes, corner[0] + width - lean / 2, corner[1] + lean / 2, "+", size=min(11, 75 * lean),
                  weight="bold", color=ink_on(rank_colour(ranks[depth])))
    x, y = corner
    colour, (rows, columns) = rank_colour(ranks[0]), elements
    grid = dict(color=ink_on(colour), alpha=0.25, linewidth=0.6)
    axes.hlines([y + height * i / rows for i in range(1, rows)], x, x + width, **grid)
    axes.vlines([x + width * i / columns for i in range(1, columns)], y, y + height, **grid)
    names = sign + ranks_text(ranks)
    names = names if width > 0.085 * len(names) else sign + ranks_text(ranks).split(" ", 1)[1]
    label = f"{names}\n{shape}" if height > 0.38 and width > 0.085 * len(shape) else names
    write(axes, x + width / 2, y + height / 2, label, color=ink_on(colour), linespacing=1.2,
          bbox=dict(facecolor=colour, edgecolor="none", pad=1.5))


def card(at: tuple[float, float], width: float, height: float, rank: int) -> Rectangle:
    """A rectangle in a rank's colour and hatch with a thin edge of paper."""
    return Rectangle(at, width, height, facecolor=rank_colour(rank), edgecolor=PAPER, linewidth=1.2,
                     hatch=rank_hatch(rank), hatchcolor=ink_on(rank_colour(rank)))
