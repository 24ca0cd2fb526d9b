"""Dropout whose mask comes from the stream of its region: equal on all ranks, or different on each."""

import torch
from torch import Tensor, nn

from tpcourse.comm.random import RandomStates


class Dropout(nn.Module):
    """Y = X M / (1 - p), where each entry of the mask M is 0 with probability p and else 1.

    X, Y: [...]. With `sharded`, X is this rank's shard (its heads, its tokens) and M is drawn from
    `random.sharded`; else X is equal on all ranks, and M, from `random.replicated`, is too.
    Kept for backward: M, one byte an entry. In evaluation, and with p = 0, Y is X and nothing is drawn.

    Raises ValueError if p is not in [0, 1).
    Source: Srivastava et al. 2014, JMLR 15, section 4; which stream where: Megatron-LM (Shoeybi et al. 2019,
    arXiv:1909.08053), appendix B.2.
    """

    def __init__(self, p: float, random: RandomStates, sharded: bool) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p={p} is not a probability of dropping that leaves something; "
                             "pass 0 or more and less than 1")
        self.p, self.random, self.sharded = p, random, sharded

    def forward(self, x: Tensor) -> Tensor:
        """x: [...]."""
        if not self.training or self.p == 0:
            return x
        generator = self.random.sharded if self.sharded else self.random.replicated
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        mask.bernoulli_(1 - self.p, generator=generator)
        return (x * mask).div_(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, {'sharded' if self.sharded else 'replicated'}"
