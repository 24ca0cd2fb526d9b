"""The gradients of one step: micro-batches add up, and replicas take the mean of theirs."""

import torch
import torch.distributed as dist
from torch import Tensor

from tpcourse.comm import Group, group_of, group_rank, group_size
from tpcourse.models.gpt import GPT


def gradients(model: GPT, ids: Tensor, target: Tensor, micro_batch: int, replicas: Group | None = None) -> Tensor:
    """Adds to the model's gradients those of the mean loss over a batch; returns this replica's share's loss.

    ids, target: [batch, sequence], the same on every rank, and every target counts. Each of the `replicas`, one
    if that is None, takes its share of the sequences, `micro_batch` at a time; afterwards all have the mean.
    Raises ValueError if the batch does not split into whole micro-batches.
    """
    count = 1 if replicas is None else group_size(replicas)
    if len(ids) % (count * micro_batch):
        raise ValueError(f"a batch of {len(ids)} does not split over {count} replicas into micro-batches of "
                         f"{micro_batch}; make it a multiple of {count * micro_batch}")
    if count > 1:
        ids, target = (whole.chunk(count)[group_rank(replicas)] for whole in (ids, target))
    share, total = micro_batch / len(ids), 0
    for own, own_target in zip(ids.split(micro_batch), target.split(micro_batch)):
        loss = model.loss(own, own_target)
        loss.backward(torch.full_like(loss, share))
        total = total + share * loss.detach()
    if count > 1:
        average_gradients(model, replicas)
    return total


@torch.no_grad()
def average_gradients(model: torch.nn.Module, replicas: Group) -> None:
    """Every gradient becomes its mean over the replicas, in place: one all-reduce of them all, end to end.

    All replicas make the call, with gradients of the same parameters. It takes a copy of the gradients for the
    time of the message. Not DistributedDataParallel: its reducer sends buckets while backward runs; here it is
    one message after it, which is easily counted.
    """
    each = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in each])
    dist.all_reduce(flat, group=group_of(replicas))
    flat /= group_size(replicas)
    for grad, mean in zip(each, flat.split([grad.numel() for grad in each])):
        grad.copy_(mean.view_as(grad))
