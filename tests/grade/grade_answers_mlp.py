"""Known-wrong solutions of lesson 04."""

from grade_answers import Wrong, whole

SUM = "        y = y.clone()\n        dist.all_reduce(y, group=group)\n"
LAST = "Leave.apply(h @ self.down.T, self.group) + self.down_bias"
BACK = "        dx = dx.clone()\n        dist.all_reduce(dx, group=ctx.group)\n"
FIRST = "F.linear(x, self.up, self.up_bias)"
RIGHT = "torch.cat([gate.chunk(n)[group.rank()], up.chunk(n)[group.rank()]])"

MLP = [
    ("no f", "Before the first product belongs f", (("x = Enter.apply(x, self.group)", "pass"),)),
    ("no sum", "that is only this rank's part of Y", ((SUM, ""),)),
    (
        "g sums in backward too",
        "dX is 3 times too large: all ranks go on with the same Y",
        (("return dy, None", "dy = dy.clone()\n        dist.all_reduce(dy)\n        return dy, None"),),
    ),
    (
        "no f, and g sums in backward",
        "Before the first product belongs f",
        (
            ("x = Enter.apply(x, self.group)", "pass"),
            ("return dy, None", "dy = dy.clone()\n        dist.all_reduce(dy)\n        return dy, None"),
        ),
    ),
    ("f averages", "dX is divided by 3", ((BACK, BACK + "        dx = dx / ctx.group.size()\n"),)),
    (
        "adds down_bias on every rank",
        "down_bias was added 3 times",
        ((LAST, "Leave.apply(F.linear(h, self.down, self.down_bias), self.group)"),),
    ),
    (
        "adds an n-th of down_bias on every rank",
        "d_down_bias is divided by 3",
        ((LAST, "Leave.apply(F.linear(h, self.down, self.down_bias / self.group.size()), self.group)"),),
    ),
    ("forgets down_bias", "down_bias is missing", ((" + self.down_bias", ""),)),
    ("forgets up_bias", "up_bias is missing", ((FIRST, "F.linear(x, self.up)"),)),
    ("forgets the GELU", "between the two products is missing", (("h = F.gelu", "h = "),)),
    ("another GELU", "tanh approximation", (("self.up_bias))", 'self.up_bias), approximate="tanh")'),)),
    (
        "sums between the two products",
        "they are different columns",
        ((FIRST, f"Leave.apply({FIRST}, self.group)"),),
    ),
    (
        "a message between the two products",
        "one all-reduce of the parts of Y",
        (("        return Leave", "        dist.all_reduce(h.detach().clone())\n        return Leave"),),
    ),
    (
        "gathers the weight",
        "forward moved the weight",
        (
            (
                "        return Leave",
                "        parts = [torch.empty_like(self.up) for _ in range(self.group.size())]\n"
                "        dist.all_gather(parts, self.up.detach())\n        return Leave",
            ),
        ),
    ),
    ("holds all of A", "the rank holds the whole up", (("up.weight.detach().chunk(n)[rank]", "up.weight"),)),
    (
        "cuts B the wrong way",
        "down is split along the wrong dimension",
        (("down.weight.detach().chunk(n, dim=1)[rank]", "down.weight.detach().tensor_split(n)[rank]"),),
    ),
    ("the same part on every rank", "up is the same on all 3 ranks", ((".chunk(n)[rank]", ".chunk(n)[0]"),)),
    ("splits down_bias", "down_bias was split", (("down.bias", "down.bias.tensor_split(n)[rank]"),)),
    (
        "keeps the whole layers beside",
        "Keep only this rank's part, as a copy",
        (("self.group = group", "self.group, self.spare = group, [up.weight.data, down.weight.data]"),),
    ),
    ("takes any hidden", "say at construction what does not divide", (("if hidden % n:", "if False:"),)),
]

SHARD = [
    ("cuts the weight as it lies", "multiply a gate by a gate", ((RIGHT, "weight.chunk(n)[group.rank()]"),)),
    ("up first", "up lies before gate", (("gate, up = weight", "up, gate = weight"),)),
    ("gate alone", "only one of the two", ((RIGHT, "gate.chunk(n)[group.rank()]"),)),
    ("rank 0's rows", "every rank returned rank 0's rows", (("[group.rank()]", "[0]"),)),
    ("deals rows out", "dealt out one by one", ((RIGHT, "weight[group.rank()::n]"),)),
    ("the whole", "the rank holds the whole weight", ((RIGHT, "weight"),)),
    (
        "broadcasts what everybody has",
        "every rank has the whole weight already",
        (("gate, up = weight", "dist.broadcast(weight.clone(), src=0)\n    gate, up = weight"),),
    ),
    ("changes its input", "leave its inputs as they were", ((RIGHT, f"{RIGHT} + 0 * weight.zero_()[0]"),)),
    ("takes any hidden", "say at once what does not divide", (("if hidden % n:", "if False:"),)),
    ("nothing", "it is not written yet", whole("def shard_gate_up(weight, group):\n    pass\n")),
]

WRONG = [Wrong("ParallelMLP", *answer) for answer in MLP]
WRONG += [Wrong("shard_gate_up", *answer) for answer in SHARD]
TWICE = (("if hidden % n:", "if len(weight) % n:"),)  # 2 divides 2 hidden, always
WRONG += [Wrong("shard_gate_up", "asks of 2 hidden", "say at once what does not divide", TWICE, ranks=2)]
