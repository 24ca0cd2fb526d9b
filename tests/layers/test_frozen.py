"""What is frozen in the whole layer stays frozen in a rank's part of it."""

import pytest
from torch import nn


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"], []], ids="-".join)
def test_linear_layers(three, frozen):
    def on_rank(mesh):
        from tpcourse.layers import ColumnParallelLinear, RowParallelLinear

        whole = nn.Linear(9, 6)
        for name in frozen:
            getattr(whole, name).requires_grad_(False)
        parts = [kind.from_linear(whole, mesh["tp"]) for kind in (ColumnParallelLinear, RowParallelLinear)]
        return [[name for name, p in part.named_parameters() if not p.requires_grad] for part in parts]

    assert three.run(on_rank) == [[frozen, frozen]] * 3


@pytest.mark.parametrize("trainable", [True, False])
def test_embedding(three, trainable):
    def on_rank(mesh):
        from tpcourse.layers import VocabParallelEmbedding

        whole = nn.Embedding(7, 2).requires_grad_(trainable)
        return VocabParallelEmbedding.from_embedding(whole, mesh["tp"]).weight.requires_grad

    assert three.run(on_rank) == [trainable] * 3
