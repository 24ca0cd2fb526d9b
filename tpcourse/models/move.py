"""Between two parts of a model: the residual stream, from one scheme's outer layout to another's."""

from torch import Tensor, nn

from tpcourse.comm import redistribute
from tpcourse.schemes import Scheme


class Move(nn.Module):
    """X in the outer layout of `target`, of X in that of `source`; X itself if the two lay it out alike."""

    def __init__(self, source: Scheme, target: Scheme) -> None:
        super().__init__()
        self.source, self.target, self.group = source.outer, target.outer, target.group

    def forward(self, x: Tensor) -> Tensor:
        """x: outer layout of the source."""
        return redistribute(x, self.source, self.target, self.group)

    def extra_repr(self) -> str:
        return "nothing to do" if self.source == self.target else f"{self.source.parts} to {self.target.parts}"
