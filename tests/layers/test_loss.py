"""vocab_parallel_cross_entropy on real ranks against F.cross_entropy of the whole logits in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes

WORDS = 11  # uneven on 2, 3 and 4 ranks
SHAPES = [(1,), (7,), (1, 5), (3, 4), ()]  # one token, several, a batch of one, of three, a bare token


def as_it_is(x):
    return x.clone()


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def permuted_on_some(x):
    """The same numbers with the first dimension innermost in memory, on every second rank only."""
    import torch.distributed as dist

    return x.movedim(0, -1).contiguous().movedim(-1, 0) if dist.get_rank() % 2 else x.clone()


def on_rank(mesh, logits, target, grad, options, change, wrong):
    """Loss and gradient after one pass, and whether the logits are unchanged. `wrong` takes our place."""
    from tpcourse.layers import vocab_parallel_cross_entropy

    own = change(logits.split(split_sizes_of(options, mesh), -1)[mesh.get_rank()]).requires_grad_()
    before = own.detach().clone()
    loss = (wrong or vocab_parallel_cross_entropy)(own, target, mesh["tp"], WORDS, **options)
    loss.backward(grad)
    return loss.detach(), own.grad, torch.equal(own.detach(), before)


def split_sizes_of(options, mesh):
    return split_sizes(options.get("padded_vocab_size") or WORDS, mesh.size())


def reference(logits, target, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, **_):
    """torch's own loss of the whole logits, plus z_loss (log Z)^2 of each token that counts."""
    logits, valid = logits[..., :WORDS], target != ignore_index
    per_token = F.cross_entropy(logits.reshape(-1, WORDS), target.flatten().long(), ignore_index=ignore_index,
                                label_smoothing=label_smoothing, reduction="none").view(target.shape)
    per_token = per_token + z_loss * torch.where(valid, logits.logsumexp(-1).square(), 0)
    if z_loss == 0 and reduction != "none":  # torch's own mean, too
        return F.cross_entropy(logits.reshape(-1, WORDS), target.flatten().long(), ignore_index=ignore_index,
                               label_smoothing=label_smoothing, reduction=reduction)
    return {"none": per_token, "sum": per_token.sum(), "mean": per_token.sum() / valid.sum()}[reduction]


def check(world, shape=(9,), target=None, change=as_it_is, wrong=None, **options):
    """Every rank's loss is that of the whole logits, its gradient the columns it holds."""
    padded = options.get("padded_vocab_size") or WORDS
    logits = (3 * torch.randn(*shape, padded, dtype=torch.float64) + 50).requires_grad_()
    target = torch.randint(WORDS, shape) if target is None else target
    loss = reference(logits, target, **options)
    grad = torch.randn_like(loss)
    loss.backward(grad)
    grads = logits.grad.split(split_sizes(padded, world.size), -1)
    outs = world.run(on_rank, logits.detach(), target, grad, options, change, wrong)
    for rank, (own_loss, own_grad, unchanged) in enumerate(outs):
        assert unchanged, "the logits were changed"
        assert_close(own_loss, loss.detach(), equal_nan=True)
        assert_close(own_grad, grads[rank], check_stride=False, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("change", [as_it_is, strided], ids=["contiguous", "strided"])
def test_against_the_whole_loss(world, shape, reduction, label_smoothing, change):
    check(world, shape, change=change, reduction=reduction, label_smoothing=label_smoothing)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_ranks_whose_memory_is_laid_out_differently(world, reduction):
    """Where what is sent has strides that differ between ranks, gloo returns wrong data in silence."""
    check(world, (3, 4, 2), change=permuted_on_some, reduction=reduction, label_smoothing=0.1, z_loss=0.1)


OPTIONS = {
    "plain": {}, "smoothed": {"label_smoothing": 0.2}, "all smooth": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2}, "both": {"label_smoothing": 0.2, "z_loss": 1e-2},
}
SOME = torch.tensor([-100, 3, -100, 10, 0, -100, 7, 7, -100])  # 5 of 9 tokens count


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("padded", [None, 12], ids=["uneven", "padded"])
def test_ignored_tokens_and_padded_columns(world, reduction, options, padded):
    check(world, target=SOME, reduction=reduction, padded_vocab_size=padded, **options)
    target = SOME.where(SOME != -100, 4)  # also an id of the vocabulary can be the ignored one
    options = options | {"ignore_index": 4}
    check(world, target=target.int(), reduction=reduction, padded_vocab_size=padded, **options)


def test_no_token_counts(world):
    """As in torch: zero for "sum" and "none", NaN for "mean"."""
    nothing = torch.full((9,), -100)
    check(world, target=nothing, reduction="none", label_smoothing=0.1, z_loss=0.1)
    check(world, target=nothing, reduction="sum")
    check(world, target=nothing, reduction="mean")


def formula(logits, target, group, vocab_size, *, smooth_over="all", count="valid", in_place=False,
            summed="reduce_from_region", pad=True, mask=True, ignore=True, label_smoothing=0.0,
            padded_vocab_size=None):
    """The loss once more, with a switch for each of the field's bugs; right as it stands."""
    import torch.distributed as dist

    from tpcourse import comm

    rank, sizes = comm.group_rank(group), split_sizes(padded_vocab_size or vocab_size, comm.group_size(group))
    start = sum(sizes[:rank])
    x = logits[..., : max(vocab_size - start, 0)] if pad else logits
    greatest = x.detach().amax(-1)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, comm.group_of(group))
    if in_place:
        logits.data.sub_(greatest[..., None])  # past autograd's own check
    else:
        x = x - greatest[..., None]
    total = getattr(comm, summed)(x.exp().sum(-1), group)
    here = (target >= start) & (target < start + x.size(-1))
    at_target = x.gather(-1, (target - start).clamp(0, x.size(-1) - 1)[..., None])[..., 0]
    at_target = at_target * here if mask else at_target
    if smooth_over == "all":
        mean = comm.reduce_from_region(x.sum(-1), group) / vocab_size
    else:
        mean = x.mean(-1)
    loss = total.log() - (1 - label_smoothing) * comm.reduce_from_region(at_target, group)
    valid = target != -100
    counted = {"valid": valid, "all": torch.ones_like(valid), "held here": here}[count].sum()
    return (loss - label_smoothing * mean).where(valid | (not ignore), 0).sum() / counted


BUGS = {
    "label smoothing over the local vocabulary": {"smooth_over": "here"},
    "mean over all tokens": {"count": "all"},
    "mean over the tokens whose target is held here": {"count": "held here"},
    "logits overwritten in place": {"in_place": True},
    "all-reduce whose backward is an all-reduce": {"summed": "all_reduce"},
    "padded columns in the softmax": {"pad": False},
    "targets of other ranks looked up": {"mask": False},
    "targets of -100 taken as held elsewhere": {"ignore": False},
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_usual_bugs_are_seen(three, bug):
    """-100 among the targets, smoothing, padding: the loss without the bug passes, with it it does not."""

    def spoilt(*args, **options):
        return formula(*args, **options, **bug)

    options = {"target": SOME, "label_smoothing": 0.2, "padded_vocab_size": 12}
    check(three, **options)
    check(three, wrong=formula, **options)
    with pytest.raises(AssertionError, match="not close|changed"):
        check(three, wrong=spoilt, **options)


def test_unequal_numbers_of_valid_tokens(square):
    """Tokens split over dp, 1 valid on one rank and 4 on the other: sum, and divide by the 5 of both."""

    def on_rank(mesh, logits, target):
        from tpcourse import comm
        from tpcourse.layers import vocab_parallel_cross_entropy

        tokens, columns = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        own = logits.chunk(2)[tokens].split(split_sizes(WORDS, 2), -1)[columns].requires_grad_()
        target = target.chunk(2)[tokens]
        losses = [vocab_parallel_cross_entropy(own, target, mesh["tp"], WORDS, reduction=reduction)
                  for reduction in ("sum", "mean")]
        count = comm.all_reduce((target != -100).sum(), mesh["dp"])
        loss = comm.reduce_from_region(losses[0], mesh["dp"]) / count
        loss.backward()
        mean_of_means = comm.all_reduce(losses[1].detach(), mesh["dp"]) / 2
        return loss.detach(), own.grad, mean_of_means

    target = torch.tensor([-100, 3, -100, -100, 0, 5, 7, 7])
    logits = torch.randn(8, WORDS, dtype=torch.float64, requires_grad=True)
    whole = F.cross_entropy(logits, target)
    whole.backward()
    for rank, (loss, grad, mean_of_means) in enumerate(square.run(on_rank, logits.detach(), target)):
        assert_close(loss, whole.detach())
        assert_close(grad, logits.grad.chunk(2)[rank // 2].split(split_sizes(WORDS, 2), -1)[rank % 2],
                     check_stride=False)
        assert abs(mean_of_means - whole) > 1e-3


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_against_loss_parallel(world, reduction):
    """torch's own loss over sharded logits: the same numbers; it sends three all-reduces, we two."""

    def on_rank(mesh, shards, target, grad, reduction):
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.parallel import loss_parallel

        from tpcourse.layers import vocab_parallel_cross_entropy

        ours, theirs = (shards[mesh.get_rank()].clone().requires_grad_() for _ in range(2))
        with tp.ledger(mesh) as our_book:
            loss = vocab_parallel_cross_entropy(ours, target, mesh["tp"], 12, reduction=reduction)
            loss.backward(grad)
        with tp.ledger(mesh) as their_book, loss_parallel():
            whole = DTensor.from_local(theirs, mesh["tp"], [Shard(1)], run_check=False)
            their_loss = F.cross_entropy(whole, target, reduction=reduction).to_local()
            their_loss.backward(grad)
        calls = [book.total("calls", op="all_reduce") for book in (our_book, their_book)]
        return [loss.detach(), ours.grad], [their_loss.detach(), theirs.grad], calls

    logits, target = torch.randn(9, 12, dtype=torch.float64), SOME
    grad = torch.randn(9 if reduction == "none" else (), dtype=torch.float64)
    shards = logits.chunk(world.size, -1)
    for ours, theirs, calls in world.run(on_rank, shards, target, grad, reduction):
        assert_close(ours, theirs)
        if world.size > 1:
            assert calls == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_are_computed_in_32(three, dtype):
    """The loss equals torch's of the same logits widened first; the gradient has the logits' own dtype."""
    logits = (4 * torch.randn(9, WORDS)).to(dtype)
    wide = logits.float().clone().requires_grad_()
    loss = F.cross_entropy(wide, SOME, label_smoothing=0.1)
    loss.backward()
    grads = wide.grad.to(dtype).split(split_sizes(WORDS, 3), -1)
    options = {"label_smoothing": 0.1}
    for rank, out in enumerate(three.run(on_rank, logits, SOME, torch.tensor(1.0), options, as_it_is, None)):
        assert out[0].dtype == torch.float32 and out[1].dtype == dtype
        assert_close(out[0], loss.detach())
        assert_close(out[1], grads[rank], check_stride=False)


def test_large_logits_do_not_overflow(three):
    """exp(1000) has no float64: without the greatest logit of all ranks subtracted, the loss is infinite."""
    logits = torch.zeros(9, WORDS, dtype=torch.float64)
    logits[:, 6] = 1000.0  # on one rank only
    for loss, grad, _ in three.run(on_rank, logits, SOME, torch.tensor(1.0), {}, as_it_is, None):
        assert_close(loss, F.cross_entropy(logits, SOME).float(), check_dtype=False)
        assert grad.isfinite().all()


@pytest.mark.parametrize("numbers, options", [(2, {"z_loss": 0.1}), (3, {"label_smoothing": 0.1})], ids=str)
def test_what_it_sends_and_keeps(world, numbers, options):
    """1 + 2 numbers a token forward, 3 with smoothing, whatever the vocabulary; nothing backward.

    Kept for backward: one tensor of this rank's logits, and a few numbers and masks a token.
    """

    def on_rank(mesh, tokens, words, options):
        from tpcourse.layers import vocab_parallel_cross_entropy

        size = split_sizes(words, mesh.size())[mesh.get_rank()]
        logits = torch.randn(tokens, size, requires_grad=True)
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            loss = vocab_parallel_cross_entropy(logits, torch.arange(tokens), mesh["tp"], words, **options)
        with tp.ledger(mesh) as backward:
            loss.backward()
        return book, len(backward), sum(saved.bytes >= tokens * size for saved in mem.tensors)

    p, tokens = world.size, 6
    rows = [Row("all_reduce", "tp", p, 1, size, wire_bytes("all_reduce", size, p), "forward")
            for size in (tokens * 4, numbers * tokens * 4)]
    for words in (211, 844):
        for book, backward, large in world.run(on_rank, tokens, words, options):
            assert book == Table(rows if p > 1 else []), book
            assert backward == 0 and large == 1


def test_errors_name_both_numbers_and_the_way_out(three):
    def on_rank(mesh):
        from tpcourse.layers import vocab_parallel_cross_entropy

        group, texts = mesh["tp"], []
        own, target = torch.zeros(2, split_sizes(WORDS, 3)[mesh.get_rank()]), torch.tensor([3, -100])
        for logits, classes, words, options in (
            (torch.zeros(2, WORDS), target, WORDS, {}),
            (torch.zeros(2, 5), target, WORDS, {}),
            (torch.zeros(2, 4), target, 8, {"padded_vocab_size": 12}),
            (torch.zeros(2, 4), target, 13, {"padded_vocab_size": 12}),
            (torch.zeros(2, 1), target, 2, {}),
            (own, target[None], WORDS, {}),
            (own, torch.tensor([0, WORDS]), WORDS, {}),
            (own, torch.tensor([0, -1]), WORDS, {}),
            (own, torch.zeros(2), WORDS, {}),
            (own, target, WORDS, {"reduction": "avg"}),
            (own, target, WORDS, {"label_smoothing": 1.5}),
        ):
            try:
                vocab_parallel_cross_entropy(logits, classes, group, words, **options)
            except (ValueError, TypeError) as error:
                texts.append(str(error))
        return texts

    over = "the 3 ranks of mesh dimension 'tp'"
    for rank, texts in enumerate(three.run(on_rank)):
        columns = split_sizes(WORDS, 3)[rank]
        held = f"but rank {rank} of {over} holds {columns} of 11; pass this rank's columns, not gathered "
        held += "ones, and padded_vocab_size if there are more than vocab_size"
        ids = "outside the vocabulary of 11; pass ids from 0 to 10, or -100 to ignore"
        last = f"leaves the last of {over} nothing or does not fit; it must be 9 to 12"
        assert texts == [
            f"logits have 11 columns, {held}",
            f"logits have 5 columns, {held}",
            f"vocab_size=8 of padded_vocab_size=12 {last}",
            f"vocab_size=13 of padded_vocab_size=12 {last}",
            f"vocab_size=2 is less than {over}, and each needs an entry; pad to 3 or use at most 2 ranks",
            f"target has shape (1, 2) for logits of (2, {columns}); pass one target a token, (2,), and "
            "logits with the columns last",
            f"target holds the id 11, {ids}",
            f"target holds the id -1, {ids}",
            "target must hold int64 or int32 ids, not torch.float32",
            "reduction='avg' is not one of 'none', 'mean', 'sum'",
            "label_smoothing=1.5 is not between 0 and 1"]
