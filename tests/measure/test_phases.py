"""Forward, backward or recomputation: against a plain count of how often a function's code ran, and when."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpcourse.measure import ledger


class Sum(torch.autograd.Function):
    """An all-reduce whose conjugate is an all-reduce; gradients are off in its forward, recomputed or not."""

    forwards = backwards = 0

    @staticmethod
    def forward(ctx, x):
        Sum.forwards += 1
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        Sum.backwards += 1
        out = grad.clone()
        dist.all_reduce(out)
        return out


class ByHand(torch.autograd.Function):
    """Recomputation as a learner writes it."""

    @staticmethod
    def forward(ctx, body, x):
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.body(x)
        y.backward(grad)
        return None, x.grad


def body(x):
    return torch.sin(Sum.apply(torch.cos(x)))


def first(x):
    return torch.sin(Sum.apply(x))


def with_silent_sum(x):
    """Also a sum without gradients, as a cross-entropy takes its maximum."""
    with torch.no_grad():
        Sum.apply(x)
    return body(x)


def with_raw_sum(x):
    """Also a sum that autograd knows nothing of."""
    Sum.forwards += 1
    total = x.detach().clone()
    dist.all_reduce(total)
    return body(x) * total


def full(inner, reentrant):
    return lambda x: checkpoint(inner, x, use_reentrant=reentrant)


def nested(outer_reentrant, inner_reentrant):
    return full(lambda x: torch.exp(full(body, inner_reentrant)(body(x))), outer_reentrant)


def twice(run):
    return lambda x: run(run(x))


STEPS = {
    "no checkpoint": body,
    "no checkpoint, silent sum": with_silent_sum,
    "non-reentrant": full(body, False),
    "reentrant": full(body, True),
    "the sum comes first, non-reentrant": full(first, False),
    "the sum comes first, reentrant": full(first, True),
    "silent sum, non-reentrant": full(with_silent_sum, False),
    "silent sum, reentrant": full(with_silent_sum, True),
    "two blocks": twice(full(body, False)),
    "only a part": lambda x: body(full(body, False)(x)),
    "nested non-reentrant": nested(False, False),
    "nested reentrant": nested(True, True),
    "nested, reentrant inside": nested(False, True),
    "nested, non-reentrant inside": nested(True, False),
    "by hand": partial(ByHand.apply, body),
    "by hand, the sum comes first": partial(ByHand.apply, first),
    "by hand, raw sum": partial(ByHand.apply, with_raw_sum),
    "by hand around a checkpoint": partial(ByHand.apply, full(body, False)),
}


def count(mesh, step):
    x = torch.ones(3, requires_grad=True)
    Sum.forwards = Sum.backwards = 0
    with ledger() as book:
        y = step(x)
        forwards = Sum.forwards
        y.sum().backward()
    ran = {"forward": forwards, "recomputation": Sum.forwards - forwards, "backward": Sum.backwards}
    return ran, {phase: book.total("calls", phase=phase) for phase in ran}


@pytest.mark.parametrize("name", STEPS)
def test_phase_is_when_the_code_ran(two, name):
    ran, listed = two.run(count, STEPS[name])[0]
    assert listed == ran
    assert ran["forward"] and ran["backward"]
    assert bool(ran["recomputation"]) == (not name.startswith("no checkpoint"))


def test_a_ledger_around_the_backward_only(two):
    def step(mesh):
        y = full(body, False)(torch.ones(3, requires_grad=True))
        with ledger() as book:
            y.sum().backward()
        return [row.phase for row in book.calls]

    assert two.run(step)[0] == ["recomputation", "backward"]


@pytest.mark.parametrize(("keep", "again"), [("all_reduce", 0), ("mm", 1)])
def test_a_selective_policy_decides_what_runs_again(two, keep, again):
    def step(mesh):
        def block(x):
            return torch.sin(x @ x.t()) * functional.all_reduce(x.detach() @ x.t(), "sum", mesh["tp"])

        def policy(context, op, *args, **kwargs):
            kept = keep in str(op) or "wait_tensor" in str(op)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        with ledger() as book:
            x = torch.ones(3, 3, requires_grad=True)
            checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
        return {phase: book.total("calls", phase=phase) for phase in ("forward", "recomputation", "backward")}

    found = two.run(step)[0]
    assert (found["forward"], found["recomputation"]) == (1, again)


def test_a_gradient_hook_is_backward(two):
    def step(mesh):
        w = torch.nn.Parameter(torch.ones(3))
        w.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        with ledger() as book:
            (w * 2).sum().backward()
        return [row.phase for row in book.calls]

    assert two.run(step)[0] == ["backward"]


def test_the_package_s_own_collectives(two):
    """Column then row, by hand: an all-reduce of the tokens forward, one backward, the first one again."""

    def step(mesh):
        from tpcourse.comm import copy_to_region, reduce_from_region

        up, down = torch.ones(7, 5, requires_grad=True), torch.ones(5, 7, requires_grad=True)

        def mlp(x):
            hidden = torch.nn.functional.gelu(copy_to_region(x, mesh["tp"]) @ up.t())
            return torch.sin(reduce_from_region(hidden @ down.t(), mesh["tp"]))

        with ledger(mesh) as book:
            checkpoint(mlp, torch.ones(9, 5, requires_grad=True), use_reentrant=False).sum().backward()
        return [(r.op, r.phase, r.dim, r.message_bytes, r.wire_bytes) for r in book.calls]

    tokens = 9 * 5 * 4
    phases = ("forward", "recomputation", "backward")
    assert two.run(step)[0] == [("all_reduce", phase, "tp", tokens, tokens) for phase in phases]
