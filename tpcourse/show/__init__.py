"""Drawings, plots and source views for notebooks; nothing else in the package imports them.

A rank has one colour in the whole course: `rank_colour`. Every figure is the last value of a cell and shows
itself, with alt text that a notebook stores as text beside the image.
"""

from tpcourse.show.bandwidth import bandwidth
from tpcourse.show.bars import bytes_text, ledger
from tpcourse.show.blocks import blocks, equation
from tpcourse.show.budget import budget, budget_sliders
from tpcourse.show.colours import rank_colour, rank_hatch
from tpcourse.show.cube import cube, cube_picker
from tpcourse.show.curves import curves, time_against_bytes
from tpcourse.show.degrees import degrees
from tpcourse.show.explorer import explorer
from tpcourse.show.filmstrip import collective
from tpcourse.show.fronts import fronts, seconds_against_budget
from tpcourse.show.growth import growth
from tpcourse.show.layout import layout, locate
from tpcourse.show.meshes import mesh_slider, meshes
from tpcourse.show.planner import Answer, planner
from tpcourse.show.slider import collective_slider
from tpcourse.show.source import source
from tpcourse.show.summa import summa, summa_slider
from tpcourse.show.winners import winners, winners_sliders

__all__ = ["Answer", "bandwidth", "blocks", "budget", "budget_sliders", "bytes_text", "collective",
           "collective_slider", "cube", "cube_picker", "curves", "degrees", "equation", "explorer",
           "fronts", "growth", "layout", "ledger", "locate", "mesh_slider", "meshes", "planner",
           "rank_colour", "rank_hatch", "seconds_against_budget", "source", "summa", "summa_slider",
           "time_against_bytes", "winners", "winners_sliders"]
