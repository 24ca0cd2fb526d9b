"""What a transformer layer keeps in bfloat16 is the table of Korthikanti et al. 2022, tensor by tensor.

The table: "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, Table 2. There s
is the sequence, b the batch, h the hidden size, a the heads, t the ranks. Ours differs in one thing, which
the paper leaves out as small: for each token a norm keeps its mean and the reciprocal of its deviation.
"""

from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcourse as tp

S, B, H, A = 6, 4, 24, 12
TABLE = {  # layout and recomputation: bytes by the paper's formula
    ("1D", "none"): lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    ("1D", "selective"): lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    ("1D", "full"): lambda s, b, h, a, t: s * b * h * 2,
    ("1D+SP", "none"): lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h),
    ("1D+SP", "selective"): lambda s, b, h, a, t: s * b * h / t * 34,
    ("1D+SP", "full"): lambda s, b, h, a, t: s * b * h / t * 2,
}
ROWS = pytest.mark.parametrize("layout, recompute", TABLE, ids=map(", ".join, TABLE))


def terms(s, b, h, a, t, layout, recompute):
    """Section 4's tensors with their bytes: the first six are split by sequence parallelism alone."""
    outer, inner, scores = s * b * h // (t if layout == "1D+SP" else 1), s * b * h // t, a * s * s * b // t
    if recompute == "full":
        return {"input of the layer": 2 * outer}
    kept = {"input of the first norm": 2 * outer, "input of the second norm": 2 * outer,
            "input of Q, K and V": 2 * outer, "input of the MLP": 2 * outer,
            "mask of attention's dropout": outer, "mask of the MLP's dropout": outer,
            "input of the projection": 2 * inner,
            "input of GELU": 8 * inner, "input of the MLP's second linear": 8 * inner}
    if recompute == "selective":
        return kept | {"Q, K and V in one": 6 * inner}
    return kept | {"Q": 2 * inner, "K": 2 * inner, "V": 2 * inner, "softmax": 2 * scores,
                   "mask of softmax's dropout": scores, "result of softmax's dropout": 2 * scores}


def norms(s, b, t, layout, recompute, width):
    """Ours alone: mean and reciprocal deviation of each token, in two norms."""
    tokens = s * b // (t if layout == "1D+SP" else 1)
    names = [] if recompute == "full" else ["mean 1", "rstd 1", "mean 2", "rstd 2"]
    return dict.fromkeys(names, width * tokens)


def kept_by(mesh, s, b, h, a, layout, recompute, device, wrong=None, **options):
    """The bytes of each storage that a layer of the course's model keeps; `wrong` spoils the layer."""
    from tpcourse.models import Block
    from tpcourse.schemes import Dense, OneD

    with torch.device(device):
        scheme = Dense() if layout == "dense" else OneD(mesh["tp"], layout == "1D+SP")
        block = Block(scheme, h, a, dropout=0.1, recompute=recompute, **options).bfloat16()
        tokens = s * b // (mesh.size() if layout == "1D+SP" else 1)
        x = torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=True)
        with mock.patch(*wrong) if wrong else mock.MagicMock(), tp.saved_activations() as mem:
            block(x, s)
    return sorted(saved.bytes for saved in mem.tensors)


def expected(size, t, layout, recompute, width=2):
    """`width` is that of a norm's numbers: torch keeps them in bfloat16 on the CPU, in float32 elsewhere."""
    paper = terms(*size, t, layout, recompute)
    row = TABLE[layout, recompute](*map(Fraction, (*size, t)))
    assert sum(paper.values()) == row  # section 4's terms add up to the table's formula, exactly
    return sorted((paper | norms(*size[:2], t, layout, recompute, width)).values())


@ROWS
@pytest.mark.parametrize("size", [(S, B, H, A), (12, 1, H, A)], ids=["s=6, b=4", "s=12, b=1"])
def test_the_table(world, size, layout, recompute):
    for kept in world.run(kept_by, *size, layout, recompute, "cpu"):
        assert kept == expected(size, world.size, layout, recompute)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_parallelism(recompute):
    """The first row, sbh(34 + 5as/h), by torch's own linear layers: both others with t = 1."""
    assert kept_by(None, S, B, H, A, "dense", recompute, "cpu") == expected((S, B, H, A), 1, "1D", recompute)
    assert TABLE["1D", "none"](S, B, H, A, 1) == S * B * H * (34 + 5 * A * S / H)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("size", [(S, B, H, A), (12, 1, H, A)], ids=["s=6, b=4", "s=12, b=1"])
def test_rotary_positions_add_their_tables(size, recompute):
    """Cosines and sines in float32, head_dim / 2 = 1 a position, for q and for k; nothing if recomputed."""
    kept = kept_by(None, *size, "dense", recompute, "cpu", rotary=True)
    tables = [4 * size[0]] * 4 if recompute == "none" else []
    assert kept == sorted(expected(size, 1, "1D", recompute) + tables)


@ROWS
def test_the_model_of_22_billion_parameters(layout, recompute):
    """The paper's Table 3: 8 ranks, s = 2048, b = 4, h = 6144, a = 64; meta tensors on a fake group."""
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        kept = kept_by(mesh, 2048, 4, 6144, 64, layout, recompute, "meta")
    finally:
        dist.destroy_process_group()
    assert kept == expected((2048, 4, 6144, 64), 8, layout, recompute, width=4)


def gathered_copy(x, weight, bias, group, sequence_parallel):
    """An entering linear as plain autograd has it: it keeps all tokens that it gathered."""
    from tpcourse.comm import all_gather

    return F.linear(all_gather(x, group, 0), weight, bias)


def core_of_old(q, k, v, causal, dropout):
    """Masked by `masked_fill`, softmax in float32: the mask is kept, and the softmax in 32 bits."""
    later = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(later, -torch.inf)
    return dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype)) @ v


@pytest.mark.parametrize("module", ["qkv", "column"])
def test_gathered_tokens_that_are_kept_are_seen(three, module):
    """All tokens in place of this rank's third: 2sbh and not 2sbh/t."""
    args = S, B, H, A, "1D+SP", "none"
    wrong = f"tpcourse.layers.{module}.entering_linear", gathered_copy
    for kept in three.run(kept_by, *args, "cpu", wrong):
        assert sum(kept) - sum(expected(args[:4], 3, *args[4:])) == 2 * S * B * H - 2 * S * B * H // 3


def test_a_kept_mask_and_a_wide_softmax_are_seen():
    """s^2 bytes of mask, and 4 bytes a score of the softmax in place of 2."""
    kept = kept_by(None, S, B, H, A, "dense", "none", "cpu", core=core_of_old)
    assert sum(kept) - sum(expected((S, B, H, A), 1, "1D", "none")) == S * S + 2 * A * S * S * B
