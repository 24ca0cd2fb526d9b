from tpcourse.show.blocks import Blocks, Equation, blocks, equation
from tpcourse.show.layout import Layout, describe, layout, locate
from tpcourse.show.filmstrip import FilmStrip, collective, collective_slider
