"""Known-wrong solutions of lesson 10."""

from grade_answers import Wrong, whole

X, W, Y = "gather(x, j)", "gather(weight, i)", "scatter_sum(terms, l)"
WORLD_GATHER = (
    "dist.all_gather([torch.empty_like(weight) for _ in range(dist.get_world_size())], weight.contiguous())"
)
BOTH_WAYS = """
def cube_forward(x, weight, i, j, l):
    terms = gather(x, j) @ gather(weight, i).T
    dist.all_reduce(terms, group=l)
    return terms.chunk(l.size())[l.rank()].contiguous()
"""

I_J_SWAPPED = (
    "X is gathered along j and W along i",
    ((X, "gather(x, i)"), ("gather(weight, i)", "gather(weight, j)")),
)

FORWARD = [
    ("the terms are not added", "this rank's own term", ((Y, "terms.chunk(l.size())[l.rank()]"),)),
    ("averages", "is divided by 2", ((Y, Y + " / l.size()"),)),
    (
        "keeps the first piece",
        "the first rank's piece",
        ((Y, "(lambda t: (dist.all_reduce(t, group=l), t.chunk(l.size())[0].clone())[1])(terms)"),),
    ),
    (
        "an all-reduce, and then a piece",
        "are enough",
        whole(
            "def gather(x, group):\n    whole = x.new_empty(group.size() * len(x), *x.shape[1:])\n"
            "    dist.all_gather_single(whole, x.contiguous(), group=group)\n    return whole\n" + BOTH_WAYS
        ),
    ),
    ("j and l swapped", "j and l are swapped", ((X, "gather(x, l)"), (Y, "scatter_sum(terms, j)"))),
    ("i and j swapped", *I_J_SWAPPED),
    (
        "gathers the weight over all ranks",
        "which lie along no one of i, j and l",
        (("terms = ", WORLD_GATHER + "\n    terms = "),),
    ),
    ("X is not gathered", "expected shape", ((X, "x"),)),
    (
        "returns the whole block",
        "expected shape",
        (("return " + Y, "dist.all_reduce(terms, group=l)\n    return terms"),),
    ),
    ("changes x", "must leave its inputs as they were", (("terms = ", "x.mul_(1.5)\n    terms = "),)),
]

SAVE = "ctx.save_for_backward(x, weight)"
DX, DW = "scatter_sum(whole_dy @ gather(weight, i), j)", "scatter_sum(whole_dy.T @ gather(x, j), i)"

BACKWARD = [
    (
        "dX is not summed",
        "this rank's own term",
        ((DX, "(whole_dy @ gather(weight, i)).chunk(j.size())[j.rank()]"),),
    ),
    (
        "dW is not summed",
        "the part of this rank's tokens",
        ((DW, "(whole_dy.T @ gather(x, j)).chunk(i.size())[i.rank()]"),),
    ),
    ("dX averaged", "dx is divided by 2", ((DX, DX + " / j.size()"),)),
    ("dW twice", "dweight is 2 times too large", ((DW, DW + " * i.size()"),)),
    (
        "keeps the gathered copies",
        "besides its inputs",
        ((SAVE, "ctx.save_for_backward(x, weight)\n        ctx.whole = gather(x, j)"),),
    ),
    (
        "keeps a gathered weight as saved tensor",
        "besides its inputs",
        (
            (SAVE, "ctx.save_for_backward(x, weight, gather(weight, i))"),
            ("(x, weight), (i, j, l) =", "(x, weight, _), (i, j, l) ="),
        ),
    ),
    (
        "gathers dY twice",
        "are enough",
        (("whole_dy = gather(dy, l)", "whole_dy = gather(dy, l)\n        whole_dy = gather(dy, l)"),),
    ),
    (
        "all-reduces dX",
        "are enough",
        (
            (
                DX,
                "(lambda t: (dist.all_reduce(t, group=j), "
                "t.chunk(j.size())[j.rank()].clone())[1])(whole_dy @ gather(weight, i))",
            ),
        ),
    ),
    ("no gradient of the weight", "dweight did not come back", (("return dx, dw,", "return dx, None,"),)),
]

MEAN = "mean = Sum.apply(x.sum(1, keepdim=True), group) / size"
VARIANCE = "variance = Sum.apply(centred.square().sum(1, keepdim=True), group) / size"
GRAD = "dist.all_reduce(grad, group=ctx.group)"
BETWEEN = "variance = Sum.apply((x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True), group) / size"

NORM = [
    (
        "its own statistics",
        "of this rank's features alone",
        (
            (MEAN, "mean = x.mean(1, keepdim=True)"),
            (VARIANCE, "variance = x.var(1, correction=0, keepdim=True)"),
        ),
    ),
    ("the mean of the variances", "the mean of the ranks' variances", ((VARIANCE, BETWEEN),)),
    (
        "E[x^2] - E[x]^2",
        "keeps nothing of a variance of 1",
        (
            (
                VARIANCE,
                "variance = Sum.apply(x.square().sum(1, keepdim=True), group) / size - mean.square()",
            ),
        ),
    ),
    (
        "divides by one less",
        "by one feature less",
        ((VARIANCE, VARIANCE.replace("/ size", "/ (size - 1)")),),
    ),
    ("identity as conjugate", "of its own outputs only", ((GRAD, "pass"),)),
    (
        "statistics are constants",
        "were taken for constants",
        (
            (MEAN, MEAN + "\n    mean = mean.detach()"),
            (VARIANCE, VARIANCE + "\n    variance = variance.detach()"),
        ),
    ),
    (
        "gathers the features",
        "features stay where they are",
        (
            (
                MEAN,
                "parts = [torch.empty_like(x) for _ in range(group.size())]\n"
                "    dist.all_gather(parts, x.detach().contiguous(), group=group)\n    " + MEAN,
            ),
        ),
    ),
    ("not centred", "nothing was subtracted", (("return centred /", "return x /"),)),
]

KEPT, SENT = "and kept <= memory", "(j - 1) * n * k + (i - 1) * k * m + (l - 1) * n * m"
CHOOSE = [
    ("looks at no memory", "sends least, but keeps", ((KEPT, ""),)),
    ("looks at no divisibility", "does not divide the sizes", (("if even and", "if"),)),
    (
        "one dimension",
        "that is 1 x P x 1",
        (("return torch.tensor(best[1])", "return torch.tensor([1, ranks, 1])"),),
    ),
    ("keeps least", "that mesh keeps least", (("sent = " + SENT, "sent = kept"),)),
    ("forgets the weight", "the weight is missing", ((SENT, SENT.replace(" + (i - 1) * k * m", "")),)),
    (
        "returns a tuple",
        "returned tuple where a tensor is expected",
        (("torch.tensor(best[1])", "best[1]"),),
    ),
]

WRONG = [Wrong("cube_forward", *answer, ranks=8) for answer in FORWARD]
WRONG += [Wrong("cube_forward", "i and j swapped, of other sizes", *I_J_SWAPPED, ranks=4)]
WRONG += [Wrong("CubeFunction", *answer, ranks=8) for answer in BACKWARD]
WRONG += [Wrong("split_layer_norm", *answer) for answer in NORM]
WRONG += [Wrong("choose_mesh", *answer, ranks=1) for answer in CHOOSE]
