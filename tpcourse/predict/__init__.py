"""What a step should cost: bytes, messages and memory as formulas, in the shape of what is measured."""

from tpcourse.predict.calibrate import calibrate
from tpcourse.predict.calibration import Calibration
from tpcourse.predict.cluster import GPU, Cluster, Link
from tpcourse.predict.machine import Machine
from tpcourse.predict.memory import Memory, memory
from tpcourse.predict.model import Transformer
from tpcourse.predict.one_d import OneD
from tpcourse.predict.three_d import ThreeD
from tpcourse.predict.time import Time, step_time
from tpcourse.predict.training import Training, training_time
from tpcourse.predict.two_d import TwoD
from tpcourse.predict.volume import volume

__all__ = ["GPU", "Calibration", "Cluster", "Link", "Machine", "Memory", "OneD", "ThreeD", "Time", "Training",
           "Transformer", "TwoD", "calibrate", "memory", "step_time", "training_time", "volume"]
