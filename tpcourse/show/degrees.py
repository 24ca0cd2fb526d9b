"""Replicas, stages and ranks: which GPU has which share of a model."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from tpcourse.show.colours import ink_on, rank_colour
from tpcourse.show.figure import Picture, canvas, write

WIDE, HIGH, GAP = 1.5, 0.72, 0.5  # inches: a GPU's box, and the space between replicas


def degrees(replicas: int, stages: int, ranks: int, layers: int) -> Picture:
    """Each GPU as a box with the layers of which it has a share, numbered as nodes take them.

    Replicas stand side by side, their stages across, the ranks of a stage below each other. Numbers go up over
    the ranks of a stage first, then over replicas, then over stages.

    Raises ValueError if the layers do not split into the stages, and for more than 32 GPUs.
    """
    if layers % stages or replicas * stages * ranks > 32:
        raise ValueError(f"{layers} layers on {replicas} x {stages} x {ranks} GPUs: stages must divide the layers, "
                         "and there is room for 32 GPUs")
    figure, axes = canvas(0.4 + replicas * (stages * WIDE + GAP), 0.85 + ranks * HIGH)
    words, each = [], layers // stages
    for replica in range(replicas):
        left = 0.3 + replica * (stages * WIDE + GAP)
        write(axes, left + stages * WIDE / 2, 0.2, f"replica {replica}", 10.5, fontweight="bold")
        for stage in range(stages):
            first, share = stage * each, "all" if ranks == 1 else f"1/{ranks}"
            what = f"{share} of layers {first}-{first + each - 1}"
            write(axes, left + (stage + 0.5) * WIDE, 0.5, f"stage {stage}", 9.5)
            for rank in range(ranks):
                number = (stage * replicas + replica) * ranks + rank
                _box(axes, left + stage * WIDE, 0.68 + rank * HIGH, number, what)
                words.append(f"GPU {number}: replica {replica}, stage {stage}, {what}")
    title = f"{replicas} replicas x {stages} stages x {ranks} ranks"
    return Picture(title, "\n".join(sorted(words, key=lambda line: int(line.split(":")[0][4:]))), figure)


def _box(axes, left: float, top: float, number: int, what: str) -> None:
    colour = rank_colour(number)
    axes.add_patch(Rectangle((left, top), WIDE - 0.06, HIGH - 0.06, facecolor=colour))
    write(axes, left + WIDE / 2 - 0.03, top + 0.23, f"GPU {number}", 9.5, color=ink_on(colour), fontweight="bold")
    write(axes, left + WIDE / 2 - 0.03, top + 0.46, what, 8, color=ink_on(colour))
