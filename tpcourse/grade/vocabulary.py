"""The tasks of lesson 05: an embedding and a cross-entropy whose vocabulary is split over the ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.grade.hub import Message
from tpcourse.measure import wire_bytes

SAYS = {  # what a wrong value usually means: {n} ranks
    "no mask": "what other ranks hold was looked up here too, and the sum has it: put zeros there",
    "own": "those are this rank's rows only: the others have the rest, and an all-reduce adds them up",
    "dealt": (
        "the rows begin at the wrong id: the first V % {n} ranks hold one row more than the others, and rank"
        " r begins where the ranks before it end"
    ),
    "mean": "every number is divided by {n}: the parts are summed, not averaged",
    "times": (
        "the gradient is {n} times too large: every rank has the whole gradient of the sum, so its backward"
        " sums nothing"
    ),
    "spilled": "this rank's first row has the gradients of ids that other ranks hold: mask backward too",
    "last": "an id that comes twice has the gradient of its last place only: the places add up",
    "local": "that is the loss over this rank's columns alone: greatest, sum and target must be all ranks'",
    "own greatest": "each rank subtracted a greatest logit of its own: sums add up after the same one only",
    "own target": "a rank that does not hold the target counts its logit as zero: sum it over the ranks",
    "ignored": "a token whose target is -100 has loss zero",
    "greatest": "the greatest logit was subtracted in the sum, but not from the target's logit",
    "everywhere": (
        "every rank subtracted the greatest logit from the target's, also where it does not hold it: subtract"
        " first, then mask"
    ),
    "one mean": "that is the mean over tokens: return the loss of each token",
    "overflow": "exp overflows: subtract the greatest logit of all ranks first",
    "underflow": "exp underflows to zero: subtract the greatest logit, with ReduceOp.MAX, and nothing above",
    "no one-hot": "that is the softmax: at the target's column, on the rank that holds it, 1 is subtracted",
    "one-hot": "1 was subtracted on ranks that do not hold the target, too",
    "ignored gradient": "a token whose target is -100 has no gradient",
    "upstream": "the gradient of the loss is missing: row i is multiplied by dloss[i]",
    "sign": "the sign is wrong: the gradient is softmax minus one-hot",
    "own softmax": "each row was divided by its sum over this rank's columns: divide by the sum over all",
}


class _Split:
    """V = nk + 1 entries, which torch.chunk would deal otherwise; each of them as an id, and some twice."""

    def __init__(self, n: int, rng: torch.Generator) -> None:
        self.n, self.words = n, n * odd(rng, 3, 5) + 1
        self.sizes = [self.words // n + (r < self.words % n) for r in range(n)]
        self.starts = [sum(self.sizes[:r]) for r in range(n)]
        twice = torch.randint(self.words, (odd(rng, 9, 13),), generator=rng)
        ids = torch.cat([torch.arange(self.words), twice])
        self.tokens = len(ids)
        self.ids = ids[torch.randperm(self.tokens, generator=rng)]

    def held(self, r: int, starts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Where rank r has each id among its own, and which of them it has."""
        local = self.ids - (starts or self.starts)[r]
        return local, (local >= 0) & (local < self.sizes[r])

    def places(self, r: int) -> list[Tensor]:
        """Where a rank that forgets its mask looks: its first entry, the nearest, or round the end."""
        local, here = self.held(r)
        return [local * here, local.clamp(0, self.sizes[r] - 1), local % self.sizes[r]]

    def says(self, mistake: str) -> str:
        return SAYS[mistake].format(n=self.n)


def embedding(n: int, rng: torch.Generator) -> list[Case]:
    """``vocab_parallel_embedding(ids, weight, group, vocab_size)`` and its backward."""
    p, h = _Split(n, rng), odd(rng, 3, 5)
    table, dy = randn(rng, p.words, h), randn(rng, p.tokens, h)
    rows, y = table.split(p.sizes), table[p.ids]
    dw = torch.zeros_like(table).index_add(0, p.ids, dy).split(p.sizes)
    inputs = [[p.ids, rows[r], dy] for r in range(n)]
    expected = [{"Y": y, "dweight": dw[r]} for r in range(n)]
    settings = {"names": ["ids", "weight"], "wanted": "weight", "more": [p.words]}
    title = f"{ranks_text(n)}, {p.tokens} ids of {p.words}, rows of {h}"
    traffic = vocabulary_traffic(n, y.nbytes, 1, "the table", {t.shape for t in (table, *rows)})
    mistakes = {"Y": _row_mistakes(p, rows, y), "dweight": _table_mistakes(p, dw, dy)}
    return [_case(p, title, "differentiable", settings, inputs, expected, mistakes, traffic)]


def _row_mistakes(p: _Split, rows: tuple[Tensor, ...], y: Tensor) -> list[Mistake]:
    n, ranks = p.n, range(p.n)

    def part(r: int, starts: list[int] | None = None) -> Tensor:
        local, here = p.held(r, starts)
        return rows[r][local.clamp(0, p.sizes[r] - 1)] * here[:, None]

    wrong = [(p.says("own"), [part(r) for r in ranks]), (p.says("mean"), [y / n] * n)]
    for step in (p.words // n, -(-p.words // n)):
        starts = [r * step for r in ranks]
        wrong.append((p.says("dealt"), [sum(part(r, starts) for r in ranks)] * n))
    unmasked = zip(*([rows[r][place] for place in p.places(r)] for r in ranks))
    return wrong + [(p.says("no mask"), [sum(parts)] * n) for parts in unmasked]


def _table_mistakes(p: _Split, dw: tuple[Tensor, ...], dy: Tensor) -> list[Mistake]:
    spilled, last = [t.clone() for t in dw], [torch.zeros_like(t) for t in dw]
    for r in range(p.n):
        local, here = p.held(r)
        spilled[r][0] += dy[~here].sum(0)
        for i in here.nonzero().flatten().tolist():
            last[r][local[i]] = dy[i]
    values = {"times": [t * p.n for t in dw], "mean": [t / p.n for t in dw], "spilled": spilled, "last": last}
    return [(p.says(name), wrong) for name, wrong in values.items()]


def cross_entropy(n: int, rng: torch.Generator) -> list[Case]:
    """``vocab_parallel_cross_entropy(logits, target, group, vocab_size)``: the loss of each token."""
    p = _Loss(n, rng)
    settings = {"group": True, "options": {"vocab_size": p.words}}
    return [p.case("function", settings, [], [{"result": p.loss}] * n, {"result": p.loss_mistakes()})]


def cross_entropy_function(n: int, rng: torch.Generator) -> list[Case]:
    """``VocabParallelCrossEntropy.apply(logits, target, group, vocab_size)`` and its backward."""
    p = _Loss(n, rng)
    dloss = randn(rng, p.tokens)
    right = [(p.softmax[r] - p.one_hot(r)) * (dloss * p.valid)[:, None] for r in range(n)]
    expected = [{"Y": p.loss, "dlogits": t} for t in right]
    mistakes = {"Y": p.loss_mistakes(), "dlogits": p.gradient_mistakes(dloss)}
    return [p.case("differentiable", {"wanted": "logits", "more": [p.words]}, [dloss], expected, mistakes)]


class _Loss(_Split):
    """Float64 logits, one token's near 1000; the targets of two tokens are -100."""

    def __init__(self, n: int, rng: torch.Generator) -> None:
        super().__init__(n, rng)
        self.x = 3 * randn(rng, self.tokens, self.words)
        self.x[0] += 1000
        self.ids[[1, self.tokens // 2]] = -100
        self.valid, self.parts = self.ids >= 0, self.x.split(self.sizes, 1)
        self.softmax = self.x.softmax(1).split(self.sizes, 1)
        self.loss = F.cross_entropy(self.x, self.ids, reduction="none")

    def at(self, r: int, less: Tensor | float, place: Tensor | None = None) -> Tensor:
        """Rank r's logit of each target, less `less`, or zero; with a ``place``, the logit there instead."""
        local, here = self.held(r)
        found = self.parts[r].gather(1, (local * here if place is None else place)[:, None])[:, 0] - less
        return found * here if place is None else found

    def one_hot(self, r: int, place: Tensor | None = None) -> Tensor:
        """Rank r's columns of one-hot rows; with a ``place``, every row has its 1 there."""
        local, here = self.held(r)
        marks = F.one_hot(local * here if place is None else place, self.sizes[r])
        return marks * here[:, None] if place is None else marks

    def loss_mistakes(self) -> list[Mistake]:
        n, ranks, greatest = self.n, range(self.n), self.x.amax(1)
        own = [part.amax(1) for part in self.parts]
        log_z = self.x.logsumexp(1) - greatest
        own_log_z = [self.parts[r].logsumexp(1) - own[r] for r in ranks]
        mixed = sum(own_log_z[r].exp() for r in ranks).log() - sum(self.at(r, own[r]) for r in ranks)
        unmasked = zip(*([self.at(r, greatest, place) for place in self.places(r)] for r in ranks))

        def less(shift: Tensor) -> Tensor:
            return (self.x - shift[:, None]).exp().sum(1).log() - sum(self.at(r, shift) for r in ranks)

        wrong = [
            ("local", [own_log_z[r] - self.at(r, own[r]) for r in ranks]),
            ("own greatest", [mixed] * n),
            ("own target", [log_z - self.at(r, greatest) for r in ranks]),
            ("greatest", [self.loss - greatest] * n),
            ("everywhere", [self.loss + (n - 1) * greatest] * n),
            ("overflow", [less(torch.zeros_like(greatest))] * n),
            ("underflow", [less(sum(own))] * n),
            ("mean", [self.loss / n] * n),
            *(("no mask", [log_z - sum(parts)] * n) for parts in unmasked),
        ]
        found = [(self.says(name), [t.where(self.valid, 0) for t in values]) for name, values in wrong]
        means = [self.loss.sum() / count for count in (self.tokens, self.valid.sum())]
        found += [(SAYS["one mean"], [mean] * n) for mean in means]
        return [*found, (self.says("ignored"), [self.loss.where(self.valid, log_z)] * n)]

    def gradient_mistakes(self, dloss: Tensor) -> list[Mistake]:
        ranks, softmax, kept = range(self.n), self.softmax, (dloss * self.valid)[:, None]
        right = [softmax[r] - self.one_hot(r) for r in ranks]
        unmasked = zip(*([softmax[r] - self.one_hot(r, place) for place in self.places(r)] for r in ranks))
        return [
            (self.says("no one-hot"), [t * kept for t in softmax]),
            (self.says("ignored gradient"), [t * dloss[:, None] for t in right]),
            (self.says("upstream"), [t * self.valid[:, None] for t in right]),
            (self.says("sign"), [-t * kept for t in right]),
            (self.says("own softmax"), [(self.parts[r].softmax(1) - self.one_hot(r)) * kept for r in ranks]),
            *((self.says("one-hot"), [t * kept for t in parts]) for parts in unmasked),
        ]

    def case(self, do: str, settings: dict, more: list[Tensor], expected: list[dict], mistakes: dict) -> Case:
        inputs = [[self.parts[r].contiguous(), self.ids, *more] for r in range(self.n)]
        title = f"{ranks_text(self.n)}, {self.tokens} tokens, a vocabulary of {self.words}"
        shapes = {t.shape for t in (self.x, *self.parts)}
        traffic = vocabulary_traffic(self.n, 3 * self.loss.nbytes, 2, "the logits", shapes)
        settings = {"names": ["logits", "target"], **settings}
        return _case(self, title, do, settings, inputs, expected, mistakes, traffic)


def _case(p: _Split, title: str, do: str, settings: dict, inputs: list[list[Tensor]], expected: list[dict],
          mistakes: dict[str, list[Mistake]], traffic: tuple[Traffic, str]) -> Case:
    """A case whose inputs must also be afterwards what they were."""
    kept = [{f"{name} after the call": t for name, t in zip(settings["names"], given)} for given in inputs]
    mistakes |= {name: [(linear.SAYS["changed"], [])] for name in kept[0]}
    expected = [{**right, **same} for right, same in zip(expected, kept)]
    return Case(title, p.n, do, settings, inputs, expected, mistakes, *traffic)


def vocabulary_traffic(n: int, numbers: int, calls: int, what: str, shapes: set) -> tuple[Traffic, str]:
    """Forward may all-reduce ``numbers`` bytes in so many ``calls``, backward nothing, and no tensor of
    ``shapes`` may move; and the praise for keeping to it.
    """
    limit = wire_bytes("all_reduce", numbers, n)
    enough = f"{bytes_text(limit)} per rank in {'one all-reduce' if calls == 1 else f'{calls} all-reduces'}"

    def judge(messages: list[Message]) -> str | None:
        for m in messages:
            call = f"rank {m.rank} called {m.op} of {list(m.shape)} (line {m.where[1]}) in {m.phase}"
            if m.phase == "backward":
                return f"{call}; every rank has what it needs there, and sends nothing"
            if m.shape in shapes:
                return f"{call}: that moves {what}; forward needs {enough}"
        for r in range(n):
            sent = [m.wire for m in messages if m.rank == r]
            if len(sent) > calls or sum(sent) > limit + 1e-6:
                return f"rank {r} sent {bytes_text(sum(sent))} in {len(sent)} calls; forward needs {enough}"
        return None

    return judge, f"forward sent {enough}, backward nothing"
