"""Known-wrong solutions of lesson 07."""

from grade_answers import Wrong, whole

PACKAGE = "comes from the package"
FORWARD_FREE = "forward needs no message at all"
WEIGHTS = "weight, bias = SumGradient.apply(weight, group), SumGradient.apply(bias, group)"
NORM = "return F.layer_norm(x, weight.shape, weight, bias)"
GATHER_X = """all_x = x.new_empty(group.size() * len(x), x.shape[1])
    dist.all_gather_single(all_x, x.detach().contiguous(), group=group)
    """
SUM = "dist.all_reduce(grad, group=ctx.group)"

NORMS = [
    ("no sum", "only the part of dweight from this rank", ((WEIGHTS, "pass"),)),
    (
        "only the weight is summed",
        "only the part of dbias from this rank",
        (("SumGradient.apply(bias, group)", "bias"),),
    ),
    ("averages", "dweight is divided by 3", ((SUM, f"{SUM}\n        grad = grad / ctx.group.size()"),)),
    ("sums twice", "dweight is 3 times too large", ((SUM, f"{SUM}\n        {SUM}"),)),
    (
        "sums the tokens' gradient, too",
        "each rank's tokens are its own, and so is their dX",
        ((WEIGHTS, f"{WEIGHTS}\n    x = SumGradient.apply(x, group)"),),
    ),
    (
        "sums the parameters in forward",
        "they are equal, and used as such",
        (
            (
                "return x.view_as(x)",
                "x = x.clone()\n        dist.all_reduce(x, group=group)\n        return x",
            ),
        ),
    ),
    ("gathers the tokens", FORWARD_FREE, ((NORM, GATHER_X + NORM),)),
    (
        "norms over the tokens",
        "over the features of each token, not over the tokens",
        ((NORM, "return F.layer_norm(x.T, (len(x),)).T * weight + bias"),),
    ),
    ("forgets the bias", "the bias is missing", ((NORM, "return F.layer_norm(x, weight.shape, weight)"),)),
    (
        "all-reduces outside of autograd",
        "dweight did not come back",
        (
            (
                WEIGHTS,
                "weight, bias = (SumGradient.forward(group, t.detach(), group) for t in (weight, bias))",
            ),
            ("ctx.group = group", "pass"),
        ),
    ),
    (
        "the package's own",
        PACKAGE,
        whole("from tpcourse.layers import LayerNorm as sequence_parallel_norm\n"),
    ),
]

SAVE = "ctx.save_for_backward(x, up)"
GATHER = "return all_gather(x, group) @ up.T"
BACK = "dh.T @ all_gather(x, ctx.group)"
KEEP = f"x = all_gather(x, group)\n        {SAVE}"
REDUCED = "dx = reduce_scatter(dh @ up, ctx.group)"
OWN_ROWS = "(dh @ up).chunk(ctx.group.size())[ctx.group.rank()]"
KEPT = "for backward besides its inputs"

MLPS = [
    (
        "keeps the gathered X",
        KEPT,
        ((SAVE, KEEP), (GATHER, "return x @ up.T"), (BACK, "dh.T @ x")),
    ),
    (
        "keeps it where autograd does not look",
        KEPT,
        (
            (SAVE, f"{SAVE}\n        ctx.x = all_gather(x, group)"),
            (GATHER, "return ctx.x @ up.T"),
            (BACK, "dh.T @ ctx.x"),
        ),
    ),
    (
        "gathers in one function and multiplies outside of it",
        KEPT,
        (
            (SAVE, "pass"),
            (GATHER, "return all_gather(x, group)"),
            (
                "def backward(ctx, dh):\n        x, up = ctx.saved_tensors",
                "def backward(ctx, dh):\n        return reduce_scatter(dh, ctx.group), None",
            ),
            ("GatherAndMultiply.apply(x, up, group)", "GatherAndMultiply.apply(x, group) @ up.T"),
            ("def forward(ctx, x, up, group)", "def forward(ctx, x, group)"),
        ),
    ),
    ("takes its rows of dX", "deals them out: a reduce-scatter", ((REDUCED, f"dx = {OWN_ROWS}"),)),
    (
        "all-reduces dX and takes its rows",
        "is all that backward needs",
        (
            (
                REDUCED,
                "dx = dh @ up\n        dist.all_reduce(dx, group=ctx.group)\n"
                "        dx = dx.chunk(ctx.group.size())[ctx.group.rank()]",
            ),
        ),
    ),
    (
        "all-reduces Y and takes its rows",
        "is all that forward needs",
        (
            (
                "return reduce_scatter(y, group)",
                "y = y.clone()\n        dist.all_reduce(y, group=group)\n"
                "        return y.chunk(group.size())[group.rank()].clone()",
            ),
        ),
    ),
    (
        "does not sum",
        "that is only this rank's term of Y",
        (("return reduce_scatter(y, group)", "return y.chunk(group.size())[group.rank()].clone()"),),
    ),
    (
        "stays with its own tokens",
        "that is only this rank's term of Y",
        (
            (GATHER, "return x @ up.T"),
            ("return reduce_scatter(y, group)", "return y.clone()"),
            ("return all_gather(dy, ctx.group), None", "return dy, None"),
            (BACK, "dh.T @ x"),
            (REDUCED, "dx = dh @ up"),
        ),
    ),
    (
        "does not gather dY",
        "each part needs the dY of all tokens",
        (
            (
                "return all_gather(dy, ctx.group), None",
                "whole = dy.new_zeros(ctx.group.size() * len(dy), dy.shape[1])\n"
                "        whole.chunk(ctx.group.size())[ctx.group.rank()].copy_(dy)\n        return whole, None",
            ),
        ),
    ),
    (
        "takes rank 0's tokens of the sum",
        "rank r keeps its own",
        (
            (
                "return reduce_scatter(y, group)",
                "y = y.clone()\n        dist.all_reduce(y, group=group)\n        return y.chunk(group.size())[0].clone()",
            ),
        ),
    ),
    ("forgets gelu", "the GELU between the two products is missing", (("F.gelu(", "("),)),
    (
        "does not gather X again",
        "dup comes from this rank's tokens alone",
        ((BACK, "dh.chunk(ctx.group.size())[ctx.group.rank()].T @ x"),),
    ),
    ("averages dX", "dx is divided by 3", ((REDUCED, f"{REDUCED} / ctx.group.size()"),)),
    (
        "gathers X a third time",
        "is all that backward needs",
        ((REDUCED, f"{REDUCED}\n        all_gather(x, ctx.group)"),),
    ),
    (
        "gathers the weight in place of the tokens",
        "forward moved the weight",
        ((GATHER, "all_gather(up, group)\n        return all_gather(x, group) @ up.T"),),
    ),
    ("the package's own", PACKAGE, whole("from tpcourse.models import MLP as sequence_parallel_mlp\n")),
]

OUTER = "outer = s * b * h / (P if sequence_parallel else 1)"
LEFT = '(5 * scores if recompute == "none" else 0)'

BYTES = [
    ("divides all", "10 of them are whole on every rank", ((OUTER, "outer = s * b * h / P"),)),
    (
        "divides only what tensor parallelism does",
        "with sequence_parallel they are",
        ((OUTER, "outer = s * b * h"),),
    ),
    ("keeps the scores", "selective recomputation keeps no scores", ((LEFT, "5 * scores"),)),
    ("forgets the scores", "the scores are missing", ((f" + {LEFT}", ""),)),
    (
        "every rank has all scores",
        "a rank has those of its own heads",
        (("a * s * s * b / P", "a * s * s * b"),),
    ),
    (
        "counts numbers",
        "each takes 2 bytes",
        (
            ("return 2 * outer", "return outer"),
            ("10 * outer", "5 * outer"),
            ("24 * inner", "12 * inner"),
            ("(5 * scores", "(2.5 * scores"),
        ),
    ),
    ("masks of two bytes", "takes one byte an entry", (("10 * outer", "12 * outer"), ("(5 * sc", "(6 * sc"))),
    (
        "the input is whole with full recomputation",
        "the layer's input is split, too",
        (("return 2 * outer", "return 2 * s * b * h"),),
    ),
    (
        "the input is split with full recomputation",
        "the layer's input is whole on every rank",
        (("return 2 * outer", "return 2 * inner"),),
    ),
    (
        "returns nothing",
        "it is not written yet, or its return is missing",
        (("return 10", "10"), ("return 2", "2")),
    ),
]

WRONG = [Wrong("sequence_parallel_norm", *answer) for answer in NORMS]
WRONG += [Wrong("sequence_parallel_mlp", *answer) for answer in MLPS]
WRONG += [Wrong("activation_bytes", *answer) for answer in BYTES]
