"""How one model is cut over ranks: every scheme is a file behind one interface, `Scheme`."""

from tpcourse.schemes.base import Scheme
from tpcourse.schemes.dense import Dense
from tpcourse.schemes.one_d import OneD
from tpcourse.schemes.parts import Layer, Parts
from tpcourse.schemes.three_d import ThreeD
from tpcourse.schemes.two_d import TwoD

__all__ = ["Dense", "Layer", "OneD", "Parts", "Scheme", "ThreeD", "TwoD"]
