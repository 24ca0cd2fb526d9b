"""A GPT: bytes or other ids in, the next one's logits out."""

import torch
from torch import Tensor, nn

from tpcourse.models.block import Block
from tpcourse.models.move import Move
from tpcourse.models.start import initialize_
from tpcourse.schemes import Parts, Scheme


class GPT(nn.Module):
    """A decoder-only transformer with `num_layers` blocks of width `dim`.

    `scheme`: one for all, or `Parts`, a scheme for each part, which also say what each layer recomputes.
    `positions`: "learned", a table of `context` rows, or "rotary". `tied`: the head's weight is the
    embedding's table. What else a block can be told (num_kv_heads, hidden, activation, norm, bias, dropout,
    core) goes to all of them. It starts with numbers that depend on `seed`, not on the scheme.

    Raises ValueError for `positions` of another name, what the scheme raises for sizes it cannot split, and
    for parts of another number of layers, a tied head on another scheme than the embedding, or dropout on
    schemes of one seed, which would draw the same masks.
    Source: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"), section 2.3; rotary:
    Su et al. 2021 (arXiv:2104.09864).
    """

    def __init__(self, scheme: Scheme | Parts, vocab_size: int, context: int, dim: int, num_layers: int,
                 num_heads: int, *, positions: str = "learned", tied: bool = True, norm: str = "layer",
                 dropout: float = 0.0, recompute: str = "none", seed: int = 0, **block: object) -> None:
        super().__init__()
        if positions not in ("learned", "rotary"):
            raise ValueError(f"positions={positions!r} is not one of 'learned', 'rotary'")
        self.scheme, self.vocab_size, self.context = scheme, vocab_size, context
        parts = _parts(scheme, num_layers, recompute, tied, dropout)
        rotary = positions == "rotary"
        self.embedding = parts.embedding.embedding(vocab_size, dim)
        self.positions = None if rotary else parts.embedding.position_embedding(context, dim)
        self.dropout = parts.embedding.dropout(dropout, inner=False)
        self.blocks = nn.ModuleList(
            Block(layer.attention, dim, num_heads, mlp_scheme=layer.mlp, recompute=layer.recompute, norm=norm,
                  rotary=rotary, dropout=dropout, **block)
            for layer in parts.layers)
        self.moves, self.to_head = _moves(parts)
        self.norm = parts.head.norm(dim, norm)
        self.head = parts.head.head(dim, vocab_size, self.embedding if tied else None)
        initialize_(self, parts.group, num_layers, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, sequence], the same on every rank. Result: inner logits, [T', vocab']."""
        batch, sequence = ids.shape
        if sequence > self.context:
            raise ValueError(f"a sequence of {sequence} exceeds context={self.context}; cut it")
        x = self.embedding(ids.flatten())  # outer
        if self.positions is not None:
            x = x + self.positions(torch.arange(sequence, device=ids.device).repeat(batch))
        x = self.dropout(x)
        for move, block in zip(self.moves, self.blocks):
            x = block(move(x), sequence)
        return self.head(self.norm(self.to_head(x)))

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token; ids and target: [batch, sequence], the same on every rank."""
        return self.scheme.loss(self(ids), target.flatten(), self.vocab_size)


def _parts(scheme: Scheme | Parts, num_layers: int, recompute: str, tied: bool, dropout: float) -> Parts:
    """The scheme of each part, checked against what the model is told."""
    if not isinstance(scheme, Parts):
        return Parts.alike(scheme, num_layers, recompute)
    if len(scheme.layers) != num_layers or recompute != "none":
        raise ValueError(f"parts of {len(scheme.layers)} layers for num_layers={num_layers} and "
                         f"recompute={recompute!r}; pass a Layer for each, which says what it recomputes")
    if tied and scheme.head is not scheme.embedding:
        raise ValueError("a tied head has the embedding's table for its weight, so it must lie as the "
                         "embedding does; give both parts one scheme, or pass tied=False")
    seeds = [part.random.seed for part in scheme.schemes]
    if dropout and len(set(seeds)) < len(seeds):
        raise ValueError(f"dropout={dropout} would draw the same masks in parts whose schemes have the same "
                         f"seed, of {seeds}; give each scheme another one")
    return scheme


def _moves(parts: Parts) -> tuple[nn.ModuleList, Move]:
    """To each layer's attention from what comes before it; and to the head."""
    before = [parts.embedding, *(layer.mlp for layer in parts.layers)]
    moves = [Move(source, layer.attention) for source, layer in zip(before, parts.layers)]
    return nn.ModuleList(moves), Move(before[-1], parts.head)


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
