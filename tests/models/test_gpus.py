"""The GPT over NCCL, one GPU a rank, against the dense one on the CPU."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp

SIZES = dict(vocab_size=11, context=6, dim=24, num_layers=2, num_heads=4)


def steps(model, ids, count=3):
    """Losses of SGD; ids: [2, 6]."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(count):
        loss = model.loss(ids, ids.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gpt_on_two_gpus(sequence_parallel, recompute):
    """In float64; what overlaps on the GPU's streams must not change a number."""
    def on_rank(mesh, ids, sequence_parallel, recompute, steps, sizes):
        from tpcourse.models import GPT
        from tpcourse.schemes import OneD

        model = GPT(OneD(mesh["tp"], sequence_parallel), **sizes, recompute=recompute).to("cuda").double()
        return steps(model, ids)

    from tpcourse.models import GPT
    from tpcourse.schemes import Dense

    ids = torch.randint(11, (2, 6))
    expected = steps(GPT(Dense(), **SIZES).double(), ids)
    for losses in tp.spawn(on_rank, ids, sequence_parallel, recompute, steps, SIZES, ranks=2):
        assert_close(losses, expected, rtol=1e-10, atol=0)
