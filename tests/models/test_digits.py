"""The ViT learns handwritten digits, the small pictures that scikit-learn ships, as the dense one does."""

import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from tpcourse.models import ViT
from tpcourse.schemes import Dense

SIZES = dict(classes=10, image=8, patch=4, dim=32, num_layers=2, num_heads=4)


def learn(model, images, targets, steps=80):
    """Losses of training on the first 1,500 pictures, and the share of the others that it then gets right."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        chosen = torch.randint(1500, (64,), generator=torch.Generator().manual_seed(step))
        loss = model.loss(images[chosen], targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    logits = model.scheme.gather_logits(model(images[1500:1796]), 10)
    return losses, (logits.argmax(-1) == targets[1500:1796]).double().mean().item()


def test_learns_digits_on_two_ranks_as_on_one(two):
    def on_rank(mesh, images, targets, learn, sizes):
        from tpcourse.models import ViT
        from tpcourse.schemes import OneD
        return learn(ViT(OneD(mesh["tp"], sequence_parallel=True), **sizes).double(), images, targets)

    digits = load_digits()
    images, targets = torch.tensor(digits.images)[:, None] / 16, torch.tensor(digits.target)
    losses, right = learn(ViT(Dense(), **SIZES).double(), images, targets)
    assert losses[0] > 2.2 and right > 0.6  # a guess is right one time in ten: ln 10 = 2.3
    for own_losses, own_right in two.run(on_rank, images, targets, learn, SIZES):
        assert_close(own_losses, losses, rtol=1e-6, atol=0)
        assert own_right == right
