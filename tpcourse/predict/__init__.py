"""What a step should cost: bytes, messages and memory as formulas, in the shape of what is measured."""

from tpcourse.predict.memory import Memory, memory
from tpcourse.predict.model import Transformer
from tpcourse.predict.one_d import OneD
from tpcourse.predict.three_d import ThreeD
from tpcourse.predict.two_d import TwoD
from tpcourse.predict.volume import volume

__all__ = ["Memory", "OneD", "ThreeD", "Transformer", "TwoD", "memory", "volume"]
