"""Attention against sums by hand: heads on one rank or dealt to several, grouped queries, what is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import RandomStates
from tpcourse.layers import Dropout, apply_rotary, core_attention, flash_attention

B, S, D = 2, 5, 3  # batch, sequence, head_dim
HEADS = [(1, 1), (4, 4), (6, 2), (3, 1)]  # heads of q, of k and v
CORES = [core_attention, flash_attention]


def tokens_first(batch, heads, sequence=S, dim=D, dtype=torch.float64):
    """[batch, heads, sequence, head_dim], strided as a linear layer leaves it: a token's heads adjoin."""
    return torch.randn(batch, sequence, heads, dim, dtype=dtype).transpose(1, 2)


def inputs(batch, heads, kv_heads, sequence=S):
    return [tokens_first(batch, n, sequence).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def by_hand(q, k, v, causal, mask=None):
    """Head by head and query by query; `mask` [batch, heads, sequence, sequence] multiplies the softmax."""
    out = torch.zeros_like(q)
    for h in range(q.size(1)):
        own_k, own_v = (t[:, h * k.size(1) // q.size(1)] for t in (k, v))  # [batch, sequence, head_dim]
        for i in range(q.size(2)):
            seen = i + 1 if causal else q.size(2)
            weights = ((own_k[:, :seen] * q[:, h, i, None]).sum(-1) / q.size(3) ** 0.5).exp()
            weights = weights / weights.sum(-1, keepdim=True)  # [batch, seen]
            if mask is not None:
                weights = weights * mask[:, h, i, :seen]
            out[:, h, i] = (weights[..., None] * own_v[:, :seen]).sum(1)
    return out


def results(core, qkv, causal, grad, *more):
    out = core(*qkv, causal, *more)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("batch, sequence", [(B, S), (1, S), (B, 1)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_against_sums_by_hand(core, batch, sequence, heads, kv_heads, causal):
    qkv = inputs(batch, heads, kv_heads, sequence)
    grad = torch.randn_like(qkv[0])
    assert_close(results(core, qkv, causal, grad), results(by_hand, qkv, causal, grad), check_stride=False)


def on_rank(mesh, core, qkv, grad, causal):
    from tpcourse.comm import my_slice

    own = [t[:, my_slice(t.size(1), mesh["tp"])].clone().requires_grad_() for t in qkv]
    return results(core, own, causal, grad[:, my_slice(grad.size(1), mesh["tp"])])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("groups", [1, 3])
def test_heads_over_ranks(world, core, groups):
    """Every rank attends with its heads: together they are the whole, and nothing is sent."""
    kv_heads = {1: 1, 2: 2, 3: 3, 4: 4}[world.size]
    qkv = inputs(B, groups * kv_heads, kv_heads)
    grad = torch.randn_like(qkv[0])
    whole = results(by_hand, qkv, True, grad)
    outs = world.run(on_rank, core, [t.detach() for t in qkv], grad, True)
    assert_close([torch.cat(parts, 1) for parts in zip(*outs)], whole, check_stride=False)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_dropout_multiplies_the_softmax(heads, kv_heads):
    random = RandomStates(3, None)
    qkv, state = inputs(B, heads, kv_heads), random.get_state()
    grad = torch.randn_like(qkv[0])
    out = results(core_attention, qkv, True, grad, Dropout(0.3, random, sharded=True))
    random.set_state(state)
    mask = torch.empty(B, heads, S, S, dtype=torch.bool).bernoulli_(0.7, generator=random.sharded)
    assert_close(out, results(by_hand, qkv, True, grad, mask / 0.7), check_stride=False)


@pytest.mark.parametrize("core", CORES)
def test_a_token_does_not_see_later_ones(core):
    q, k, v = (tokens_first(B, 4) for _ in range(3))
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, 3:], later_v[:, :, 3:] = torch.randn(2, B, 4, 2, D)
    before, after = core(q, k, v, True), core(q, later_k, later_v, True)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.isclose(before[:, :, 3:], after[:, :, 3:]).any()


def grouped_by_turns(q, k, v, causal):
    """The usual mistake: query head h takes key head h mod kv_heads, not h // groups."""
    k, v = (t.repeat(1, q.size(1) // t.size(1), 1, 1) for t in (k, v))
    return core_attention(q, k, v, causal)


def unscaled(q, k, v, causal):
    return core_attention(q * q.size(-1) ** 0.5, k, v, causal)


def sees_the_next(q, k, v, causal):
    scores = (q @ k.repeat_interleave(3, 1).mT / q.size(-1) ** 0.5)
    later = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(2)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)


@pytest.mark.parametrize("wrong", [grouped_by_turns, unscaled, sees_the_next])
def test_the_usual_bugs_are_seen(wrong):
    """Heads 1 and 4 have another k if dealt by turns; the first and the last token may come out right."""
    qkv = inputs(B, 6, 2)
    seen = torch.isclose(wrong(*qkv, True), by_hand(*qkv, True)).all(-1)
    assert not seen[:, [1, 4], 1:4].any()


def kept(core, heads, kv_heads, batch, sequence, dim, *more, rotary=False, device="cpu"):
    """Bytes kept of a core that takes its inputs from one fused Q|K|V in bfloat16, as in a model."""
    with torch.device(device):
        fused = torch.randn(batch * sequence, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        fused.requires_grad_()
        with tp.saved_activations() as mem:
            parts = (1 * fused).split([n * dim for n in (heads, kv_heads, kv_heads)], -1)
            q, k, v = (t.view(batch, sequence, -1, dim).transpose(1, 2) for t in parts)
            if rotary:
                q, k = (apply_rotary(t, torch.arange(sequence)) for t in (q, k))
            core(q, k, v, True, *more)
    return mem.bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_what_it_keeps(heads, kv_heads, batch, device):
    """In 16 bits, Korthikanti's 4sbh + 2sbh for q, k, v; 2as^2b, as^2b, 2as^2b for softmax and dropout."""
    s, d = 7, 4
    qkv, scores = 2 * (heads + 2 * kv_heads) * s * batch * d, heads * s * s * batch
    size = heads, kv_heads, batch, s, d
    dropout = Dropout(0.1, RandomStates(3, None), True)
    assert kept(core_attention, *size, device=device) == qkv + 2 * scores
    assert kept(core_attention, *size, dropout, device=device) == qkv + (2 + 1 + 2) * scores
    tables = 2 * 2 * s * (d // 2) * 4  # cosines and sines in float32, for q and for k
    assert kept(core_attention, *size, rotary=True, device=device) == qkv + 2 * scores + tables


def test_the_fused_kernel_keeps_no_scores():
    """From one length to the next it keeps in proportion to the sequence, not to its square."""
    per_token = [kept(flash_attention, 4, 4, 2, s, 8) / s for s in (16, 64)]
    assert per_token[1] <= per_token[0]


@pytest.mark.parametrize("core", CORES)
def test_16_bits_lose_no_more_than_rounding_the_result_and_the_softmax(core):
    """Sums are made in float32: with 1000 equal weights, a sum in bfloat16 would stop at 256."""
    n = 1000
    q, k = torch.zeros(2, 1, 1, n, 4, dtype=torch.bfloat16)
    out = core(q, k, torch.ones_like(q), False)
    assert_close(out, torch.ones_like(out), atol=2**-8, rtol=0)


def test_scores_are_scaled_before_they_can_overflow():
    """q k^T = 1e5 is above the greatest float16, q k^T / 8 is not; a product scaled afterwards gives NaN."""
    q = torch.full((1, 1, 3, 64), (1e5 / 64) ** 0.5, dtype=torch.float16)
    assert (q @ q.mT / 8).softmax(-1).isnan().all()
    assert_close(core_attention(q, q, torch.ones_like(q), True), torch.ones_like(q), atol=1e-3, rtol=0)


@pytest.mark.parametrize("core", CORES)
def test_errors_name_the_numbers_and_the_way_out(core):
    q = torch.zeros(2, 6, 5, 4)
    with pytest.raises(ValueError, match="6 heads of q are not divisible by 4 heads of k and v; each k"):
        core(q, q[:, :4], q[:, :4], True)
    shapes = r"q has shape \(2, 6, 5, 4\), k \(2, 6, 3, 4\) and v \(2, 6, 3, 4\); pass \[batch, heads"
    with pytest.raises(ValueError, match=shapes):
        core(q, q[:, :, :3], q[:, :, :3], True)
    for bad in ((q, q[:, :3], q), (q, q[..., :3], q[..., :3]), (q[0], q[0], q[0])):
        with pytest.raises(ValueError, match="pass .batch, heads, sequence, head_dim."):
            core(*bad, True)


def test_the_fused_kernel_refuses_dropout():
    q, random = torch.zeros(2, 6, 5, 4), RandomStates(3, None)
    with pytest.raises(ValueError, match="cannot draw dropout p=0.1 from the stream of its region"):
        flash_attention(q, q, q, True, Dropout(0.1, random, True))
    assert_close(flash_attention(q, q, q, True, Dropout(0.0, random, True)), F.relu(q))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_attention_keeps_dry_what_it_keeps(kv_heads):
    """q, k, v, O and a float32 a query and head: no scores, neither on the CPU nor on meta."""
    from tpcourse.layers import flash_attention
    from tpcourse.measure import saved_activations

    for device in ("cpu", "meta"):
        q = torch.randn(2, 4, 64, 8, device=device, requires_grad=True)
        k, v = (torch.randn(2, kv_heads, 64, 8, device=device, requires_grad=True) for _ in range(2))
        with saved_activations() as mem:
            flash_attention(q, k, v, causal=True)
        assert mem.bytes == 2 * q.nbytes + 2 * k.nbytes + 2 * 4 * 64 * 4
