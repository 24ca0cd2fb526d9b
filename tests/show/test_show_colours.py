"""The ranks' colours can be told apart, colour blindness or not, and what is written on them can be read."""

import itertools

import numpy as np
import pytest

from tpcourse import show
from tpcourse.show.colours import PALETTE, ink_on, luminance

# How linear RGB looks to people without one kind of cone: G. Machado, M. Oliveira, L. Fernandes,
# "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
MINIMUM = 15  # CIE 1976 distance; two colours side by side are just told apart at about 2.3


def lab(colour: str, vision) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(vision) @ linear, 0, 1)
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    ratio = np.array(to_xyz) @ seen / [0.95047, 1, 1.08883]
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
def test_eight_colours_stay_apart(vision):
    seen = [lab(show.rank_colour(rank), VISION[vision]) for rank in range(8)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= MINIMUM


def test_colour_and_hatch_name_32_ranks():
    assert len({(show.rank_colour(rank), show.rank_hatch(rank)) for rank in range(32)}) == 32
    assert all(show.rank_hatch(rank) == "" for rank in range(8))


@pytest.mark.parametrize("colour", PALETTE)
def test_labels_contrast_with_their_colour(colour):
    light, dark = sorted([luminance(colour), luminance(ink_on(colour))], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, level AA


def test_negative_rank():
    with pytest.raises(ValueError, match="rank=-1"):
        show.rank_colour(-1)
