"""One colour per rank for the whole course, and the ink that reads on it."""

from __future__ import annotations

# The eight colours of M. Okabe and K. Ito, "Color Universal Design" (2008), made to be told apart with every
# common kind of colour vision. tests/show/test_colours.py measures how far apart they stay.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx")

PAPER, INK, FAINT = "#FFFFFF", "#1A1A1A", "#767676"


def rank_colour(rank: int) -> str:
    """The colour of a rank as `#RRGGBB`; rank 8 has rank 0's again, told apart by `rank_hatch`."""
    return PALETTE[_checked(rank) % len(PALETTE)]


def rank_hatch(rank: int) -> str:
    """The hatch laid over a rank's colour: none for ranks 0 to 7, then one kind for each further eight.

    From rank 32 on both repeat, and only the rank's number, which every drawing writes, tells them apart.
    """
    return HATCHES[_checked(rank) // len(PALETTE) % len(HATCHES)]


def luminance(colour: str) -> float:
    """Relative luminance of `#RRGGBB`, 0 (black) to 1 (white), as WCAG 2.2 defines it."""
    red, green, blue = (_linear(int(colour[i:i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(colour: str) -> str:
    """Black or white, whichever contrasts more with `colour` (WCAG 2.2 contrast ratio)."""
    light = luminance(colour)
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#FFFFFF"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _checked(rank: int) -> int:
    if rank < 0:
        raise ValueError(f"rank={rank} is negative; ranks count from 0")
    return rank
