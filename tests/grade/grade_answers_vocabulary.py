"""Known-wrong solutions of lesson 05."""

from grade_answers import Wrong, whole

MASK = "rows.masked_fill(elsewhere[:, None], 0)"
START = "group.rank() * each + min(group.rank(), more)"
SUM = "return Sum.apply("
LOOKUP = "weight[local.masked_fill(elsewhere, 0)]"
OWN_LOOKUP = "Lookup.apply(weight, local.masked_fill(elsewhere, 0))"
SILENT = "in backward; every rank has what it needs there"
CHANGED = "the function must leave its inputs as they were"
GATHER_TABLE = """
    most = -(-vocab_size // group.size())
    padded = torch.zeros(most, weight.shape[1], dtype=weight.dtype)
    padded[: len(weight)] = weight.detach()
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
"""
OWN_BACKWARD = """
class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, local):
        ctx.save_for_backward(local)
        ctx.rows = len(weight)
        return weight[local]

    @staticmethod
    def backward(ctx, dy):
        dw = dy.new_zeros(ctx.rows, dy.shape[1])
        {how}
        return dw, None


def vocab"""
ADD = "dw.index_add_(0, ctx.saved_tensors[0], dy)"
LAST = "for at, grad in zip(ctx.saved_tensors[0], dy): dw[at] = grad if grad.any() else dw[at]"
HIDE = """class Hide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        return x.masked_fill(mask[:, None], 0)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Sum"""

EMBEDDING = [
    ("no mask, row 0 is looked up", "the sum has it: put zeros there", ((MASK, "rows"),)),
    (
        "no mask, the nearest row is looked up",
        "the sum has it: put zeros there",
        ((MASK, "rows"), ("local.masked_fill(elsewhere, 0)", "local.clamp(0, size - 1)")),
    ),
    ("no sum", "those are this rank's rows only", ((f"{SUM}{MASK}, group)", f"return {MASK}"),)),
    (
        "averages",
        "divided by 3: the parts are summed",
        ((f"{SUM}{MASK}, group)", f"{SUM}{MASK}, group) / group.size()"),),
    ),
    ("takes the vocabulary to divide", "the rows begin at the wrong id", ((START, "group.rank() * each"),)),
    ("deals as torch.chunk", "the rows begin at the wrong id", ((START, "group.rank() * (each + 1)"),)),
    (
        "sums in backward, too",
        "the gradient is 3 times too large",
        (("return grad, None", "dist.all_reduce(grad)\n        return grad, None"),),
    ),
    (
        "a message that backward does not need",
        SILENT,
        (("return grad, None", "dist.all_reduce(grad.clone())\n        return grad, None"),),
    ),
    ("gathers the table", "that moves the table; forward needs", ((SUM, GATHER_TABLE + "    " + SUM),)),
    ("changes the ids", CHANGED, (("ids - start", "ids.sub_(start)"),)),
    ("loses the way back", "no dweight: autograd finds no way back", (("weight[", "weight.detach()["),)),
    (
        "a backward of its own in which the last place wins",
        "has the gradient of its last place only",
        (("def vocab", OWN_BACKWARD.format(how=LAST)), (LOOKUP, OWN_LOOKUP)),
    ),
    (
        "a mask in forward only",
        "mask backward too",
        (
            ("def vocab", OWN_BACKWARD.format(how=ADD)),
            (LOOKUP, OWN_LOOKUP),
            (MASK, "Hide.apply(rows, elsewhere)"),
            ("class Sum", HIDE),
        ),
    ),
    (
        "the package's own",
        "comes from the package",
        whole("from tpcourse.layers import VocabParallelEmbedding as vocab_parallel_embedding\n"),
    ),
]

GREATEST = "dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)"
TOTAL = "sums = torch.stack([x.exp().sum(-1), at_target])\n    dist.all_reduce(sums, group=group)"
SEPARATE = "sums = [x.exp().sum(-1), at_target]\n    for one in sums: dist.all_reduce(one, group=group)"
GATHER = """whole = torch.zeros(len(logits), vocab_size, dtype=logits.dtype)
    whole[:, start : start + size] = logits
    dist.all_reduce(whole, group=group)
    return torch.nn.functional.cross_entropy(whole, target, reduction="none")
    greatest ="""
TARGET = "[:, 0].masked_fill(elsewhere, 0)"
IGNORED = ".masked_fill(target == -100, 0)"

LOSS = [
    ("gathers the logits", "that moves the logits", (("greatest =", GATHER),)),
    ("sends three messages", "in 3 calls; forward needs", ((TOTAL, SEPARATE),)),
    ("each rank's own greatest", "subtracted a greatest logit of its own", ((GREATEST, "pass"),)),
    ("adds up the greatest", "exp underflows to zero", (("ReduceOp.MAX", "ReduceOp.SUM"),)),
    ("subtracts nothing", "exp overflows", (("logits - greatest[:, None]", "logits * 1"),)),
    (
        "over its own columns",
        "the loss over this rank's columns alone",
        ((GREATEST, "pass"), ("dist.all_reduce(sums, group=group)", "pass")),
    ),
    (
        "the target's logit is not summed",
        "counts its logit as zero: sum it over the ranks",
        ((", at_target])", ", at_target])\n    own = at_target"), ("- sums[1]", "- own")),
    ),
    ("no mask", "the sum has it: put zeros there", (("[:, 0].masked_fill(elsewhere, 0)", "[:, 0]"),)),
    ("-100 counts", "a token whose target is -100 has loss zero", ((IGNORED, ""),)),
    ("the greatest half subtracted", "not from the target's logit", (("= x.gather", "= logits.gather"),)),
    ("averages", "divided by 3: the parts are summed", ((IGNORED, IGNORED + " / group.size()"),)),
    (
        "overwrites the logits",
        CHANGED,
        (("logits - greatest[:, None]", "logits.sub_(greatest[:, None])"),),
    ),
    ("returns the mean", "expected shape", ((IGNORED, ".mean()"),)),
    (
        "returns the mean of those that count",
        "return the loss of each token",
        ((IGNORED, f"{IGNORED}.sum() / (target != -100).sum()"),),
    ),
    ("returns the mean over all tokens", "return the loss of each token", ((IGNORED, f"{IGNORED}.mean()"),)),
    (
        "subtracts the greatest after the mask",
        "subtract first, then mask",
        (("= x.gather", "= logits.gather"), (TARGET, f"{TARGET} - greatest")),
    ),
]

CLONE = "grad = softmax.clone()"
MINUS = "grad[torch.arange(len(local)), local] -= (~elsewhere).double()"
DLOSS = "dloss.masked_fill(ignored, 0)"
KEPT = "exp / sums[0][:, None]"

BACKWARD = [
    ("softmax alone", "that is the softmax", ((MINUS, "pass"),)),
    ("one-hot on every rank", "on ranks that do not hold the target", (("(~elsewhere).double()", "1"),)),
    ("-100 has a gradient", "a token whose target is -100 has no gradient", ((DLOSS, "dloss"),)),
    ("without dloss", "row i is multiplied by dloss[i]", ((DLOSS, "(~ignored)"),)),
    ("the sign", "the gradient is softmax minus one-hot", (("return grad * dloss", "return -grad * dloss"),)),
    ("a softmax of its own columns", "divide by the sum over all", ((KEPT, "logits.softmax(1)"),)),
    ("sums dloss in backward", SILENT, ((CLONE, f"{CLONE}\n        dist.all_reduce(dloss.clone())"),)),
    ("sends the sum again", SILENT, ((CLONE, f"{CLONE}\n        dist.all_reduce(grad.sum(1))"),)),
    ("keeps the softmax in the logits' place", CHANGED, ((KEPT, f"logits.copy_({KEPT})"),)),
    (
        "no gradient at all",
        "dlogits did not come back",
        ((f"return grad * {DLOSS}[:, None]", "return None"),),
    ),
]

WRONG = [Wrong("vocab_parallel_embedding", *answer) for answer in EMBEDDING]
WRONG += [Wrong("vocab_parallel_cross_entropy", *answer) for answer in LOSS]
WRONG += [Wrong("VocabParallelCrossEntropy", *answer) for answer in BACKWARD]
