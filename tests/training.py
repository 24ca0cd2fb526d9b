"""What tests of whole models train with."""

import torch


def steps(model, inputs, targets):
    """Three steps of SGD with momentum: the losses, the first gradients, the last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, first = [], None
    for x, target in zip(inputs, targets):
        loss = model.loss(x, target)
        optimizer.zero_grad()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}
