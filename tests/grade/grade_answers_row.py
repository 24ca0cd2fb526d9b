"""Known-wrong solutions of lesson 03."""

from grade_answers import Wrong, whole

SUM = "dist.all_reduce(y, group=group)"
PARTS = "[torch.empty_like(y) for _ in range(group.size())]"
GATHER = f"parts = {PARTS}\n    dist.all_gather(parts, y, group=group)\n    "
KEEP = ".chunk(n, dim=1)[rank]"

FORWARD = [
    ("does not sum", "that is only this rank's part of Y", ((SUM, "pass"),)),
    (
        "adds the bias before the sum",
        "the bias was added 3 times, by every rank before the sum",
        (
            ("y = x @ weight.T", "y = torch.nn.functional.linear(x, weight, bias)"),
            ("return y if bias is None else y + bias", "return y"),
        ),
    ),
    ("forgets the bias", "the bias is missing", (("return y if bias is None else y + bias", "return y"),)),
    ("averages", "the parts are added, not averaged", ((SUM, SUM + "\n    y = y / group.size()"),)),
    (
        "puts the parts side by side",
        "they are terms of one sum and belong added up",
        (
            (SUM, GATHER + "y = torch.cat(parts, dim=-1)"),
            ("return y if bias is None else y + bias", "return y"),
        ),
    ),
    ("gathers the parts and adds them up", "is all that forward needs", ((SUM, GATHER + "y = sum(parts)"),)),
    (
        "gathers weight and X",
        "forward moved the weight: all_gather of [",
        (
            (
                f"y = x @ weight.T\n    {SUM}",
                """def all_of(t):
        parts = [torch.empty_like(t) for _ in range(group.size())]
        dist.all_gather(parts, t, group=group)
        return torch.cat(parts, dim=-1)
    y = all_of(x) @ all_of(weight).T""",
            ),
        ),
    ),
    ("sums twice", "is all that forward needs", ((SUM, f"{SUM}\n    dist.all_reduce(y.clone())"),)),
    ("changes its input", "leave its inputs as they were", (("x @ weight.T", "x.mul_(2) @ weight.T / 2"),)),
    ("returns nothing", "it is not written yet, or its return is missing", (("return y if", "y if"),)),
]

MODULE = [
    ("no sum", "that is only this rank's part of Y", (("        dist.all_reduce(y, group=group)\n", ""),)),
    (
        "backward sums too",
        "dX is 3 times too large: all ranks go on with the same Y",
        (("return dy, None", "dy = dy.clone()\n        dist.all_reduce(dy)\n        return dy, None"),),
    ),
    (
        "backward averages",
        "dX is divided by 3",
        (("return dy, None", "return dy / dist.get_world_size(), None"),),
    ),
    (
        "sums outside of autograd",
        "dX did not come back",
        (("SumParts.apply(x @ self.weight.T,", "SumParts.forward(self, (x @ self.weight.T).detach(),"),),
    ),
    (
        "adds the bias on every rank",
        "the bias was added 3 times",
        (
            ("x @ self.weight.T, self", "torch.nn.functional.linear(x, self.weight, self.bias), self"),
            ("return y if self.bias is None else y + self.bias", "return y"),
        ),
    ),
    (
        "adds an n-th of the bias on every rank",
        "with bias / 3 added on every rank Y comes out right, and db does not",
        (
            (
                "y = SumParts",
                "b = 0 if self.bias is None else self.bias / dist.get_world_size()\n        y = SumParts",
            ),
            ("x @ self.weight.T, self", "x @ self.weight.T + b, self"),
            ("return y if self.bias is None else y + self.bias", "return y"),
        ),
    ),
    (
        "only rank 0 adds the bias",
        "db did not come back",
        (
            (
                "y = SumParts",
                "b = 0 if self.bias is None or dist.get_rank() else self.bias\n        y = SumParts",
            ),
            ("x @ self.weight.T, self", "x @ self.weight.T + b, self"),
            ("return y if self.bias is None else y + self.bias", "return y"),
        ),
    ),
    (
        "the gradient of a whole X is not gathered",
        "only this rank's features of dX are there",
        (
            (
                "x = TakeFeatures.apply(x, self.group)",
                "x = x.chunk(self.group.size(), -1)[self.group.rank()]",
            ),
        ),
    ),
    (
        "gathers dX by an all-reduce of zeros",
        "gathering the features of dX takes",
        (
            (
                "parts = [torch.empty_like(dx) for _ in range(ctx.group.size())]",
                "parts = [torch.zeros_like(dx) for _ in range(ctx.group.size())]",
            ),
            (
                "dist.all_gather(parts, dx.contiguous(), group=ctx.group)",
                "parts[ctx.group.rank()] = dx\n"
                "        whole = torch.cat(parts, dim=-1)\n        dist.all_reduce(whole)",
            ),
            ("return torch.cat(parts, dim=-1), None", "return whole, None"),
        ),
    ),
    ("takes rank 0's features", "rank r takes its own", (("[group.rank()].contig", "[0].contig"),)),
    ("holds the whole weight", "the rank holds the whole weight", ((KEEP, ""),)),
    ("every rank keeps the first columns", "all 3 shards are equal", ((KEEP, ".chunk(n, dim=1)[0]"),)),
    (
        "every rank draws its own",
        "all 3 shards are equal",
        ((KEEP, ""), ("torch.nn.Linear(in_features, out", "torch.nn.Linear(in_features // n, out")),
    ),
    (
        "splits the wrong dimension",
        "that is a split along out_features",
        ((KEEP, ".tensor_split(n, dim=0)[rank]"),),
    ),
    (
        "splits the bias",
        "the bias was split",
        (("whole.bias.detach().clone()", "whole.bias.detach().tensor_split(n)[rank].clone()"),),
    ),
    ("holds a view of the whole", "Keep only this rank's part, as a copy", ((f"{KEEP}.clone()", KEEP),)),
    ("takes any in_features", "Expected ValueError", (("if in_features % n:", "if False:"),)),
    (
        "the package's own",
        "tpcourse.layers.RowParallelLinear comes from the package",
        whole("\nfrom tpcourse.layers import RowParallelLinear\n"),
    ),
]

WRONG = [Wrong("row_parallel_forward", *answer) for answer in FORWARD]
WRONG += [Wrong("RowParallelLinear", *answer) for answer in MODULE]
