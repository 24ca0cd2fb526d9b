"""A GPT: bytes or other ids in, the next one's logits out."""

import torch
from torch import Tensor, nn

from tpcourse.models.block import Block
from tpcourse.models.start import initialize_
from tpcourse.schemes import Scheme


class GPT(nn.Module):
    """A decoder-only transformer with `num_layers` blocks of width `dim`.

    `positions`: "learned", a table of `context` rows, or "rotary". `tied`: the head's weight is the
    embedding's table. What else a block can be told (num_kv_heads, hidden, activation, norm, bias, dropout,
    recompute, core) goes to all of them. It starts with numbers that depend on `seed`, not on the scheme.

    Raises ValueError for `positions` of another name, and what the scheme raises for sizes it cannot split.
    Source: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"), section 2.3; rotary:
    Su et al. 2021 (arXiv:2104.09864).
    """

    def __init__(self, scheme: Scheme, vocab_size: int, context: int, dim: int, num_layers: int,
                 num_heads: int, *, positions: str = "learned", tied: bool = True, norm: str = "layer",
                 dropout: float = 0.0, seed: int = 0, **block: object) -> None:
        super().__init__()
        if positions not in ("learned", "rotary"):
            raise ValueError(f"positions={positions!r} is not one of 'learned', 'rotary'")
        self.scheme, self.vocab_size, self.context = scheme, vocab_size, context
        rotary = positions == "rotary"
        self.embedding = scheme.embedding(vocab_size, dim)
        self.positions = None if rotary else scheme.position_embedding(context, dim)
        self.dropout = scheme.dropout(dropout, inner=False)
        self.blocks = nn.ModuleList(
            Block(scheme, dim, num_heads, norm=norm, rotary=rotary, dropout=dropout, **block)
            for _ in range(num_layers))
        self.norm = scheme.norm(dim, norm)
        self.head = scheme.head(dim, vocab_size, self.embedding if tied else None)
        initialize_(self, scheme.group, num_layers, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, sequence], the same on every rank. Result: inner logits, [T', vocab']."""
        batch, sequence = ids.shape
        if sequence > self.context:
            raise ValueError(f"a sequence of {sequence} exceeds context={self.context}; cut it")
        x = self.embedding(ids.flatten())  # outer
        if self.positions is not None:
            x = x + self.positions(torch.arange(sequence, device=ids.device).repeat(batch))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, sequence)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; ids and target: [batch, sequence], the same on every rank."""
        return self.scheme.loss(self(ids), target.flatten(), self.vocab_size)


@torch.no_grad()
def generate(model: GPT, ids: Tensor, count: int, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """`ids` [sequence], the same on every rank, with `count` more, drawn one by one; all ranks draw the same.

    The window always has `context` places, those behind the last id filled with zeros that no query sees: so
    with sequence parallelism it is `context` that must divide by the ranks, not each length on the way.
    Where a scheme splits the batch, each of those ranks computes the same window.
    Raises ValueError for a temperature that is not above zero, and for no ids to begin with.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above zero; a small one takes the likeliest id")
    if not len(ids):
        raise ValueError("there are 0 ids to go on from; pass at least one")
    generator, training = torch.Generator(device="cpu").manual_seed(seed), model.training
    model.eval()
    try:
        for _ in range(count):
            likely = (_next_logits(model, ids).float().cpu() / temperature).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(likely, 1, generator=generator).to(ids.device)])
    finally:
        model.train(training)
    return ids


def _next_logits(model: GPT, ids: Tensor) -> Tensor:
    """The logits, [vocab_size], of what follows ids, [sequence]; on every rank."""
    window = ids[-model.context:]
    padded = torch.nn.functional.pad(window, (0, model.context - len(window)))
    logits = model(padded.expand(model.scheme.batch_ranks, -1))
    return model.scheme.gather_logits(logits, model.vocab_size)[len(window) - 1]
