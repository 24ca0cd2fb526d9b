"""How one model is cut over ranks: every scheme is a file behind one interface, `Scheme`."""

from tpcourse.schemes.base import Scheme
from tpcourse.schemes.dense import Dense
from tpcourse.schemes.one_d import OneD

__all__ = ["Dense", "OneD", "Scheme"]
