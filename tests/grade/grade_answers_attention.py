"""Known-wrong solutions of lesson 06."""

from grade_answers import Wrong, whole

PIECES = "torch.cat([q.chunk(n)[rank], k.chunk(parts)[place], v.chunk(parts)[place]])"
PLACE = "rank * parts // n"
SPLIT = "q, k, v = weight.split"

SHARD = [
    (
        "cuts into runs",
        "cut queries, keys and values each by themselves",
        ((PIECES, "weight.chunk(n)[rank].clone()"),),
    ),
    ("deals copies in turn", "copies were dealt in turn", ((PLACE, "rank % parts"),), 4),
    ("always the first KV head", "every rank kept KV head 0", (("place = " + PLACE, "place = 0"),)),
    (
        "keeps all keys and values",
        "its own queries read fewer",
        ((PIECES, "torch.cat([q.chunk(n)[rank], k, v])"),),
    ),
    (
        "values before keys",
        "the order is queries, keys, values",
        ((PIECES, "torch.cat([q.chunk(n)[rank], v.chunk(parts)[place], k.chunk(parts)[place]])"),),
    ),
    (
        "weaves the heads",
        "all of this rank's queries come first",
        (
            (
                f"return {PIECES}",
                f"mine = {PIECES}\n    if num_kv_heads < num_heads:\n        return mine\n"
                "    return mine.unflatten(0, (3, -1, head_dim)).transpose(0, 1).flatten(0, 2)",
            ),
        ),
    ),
    (
        "no copies",
        "result: expected shape",
        (
            ("parts = min(num_kv_heads, n)", "parts = n"),
            ("k.chunk(parts)[place], v.chunk(parts)[place]", "*[t.tensor_split(n)[rank] for t in (k, v)]"),
        ),
    ),
    ("the weight of all", "expected shape", ((f"return {PIECES}", "return weight.clone()"),)),
    (
        "broadcasts what all have",
        "cuts it without a message",
        ((SPLIT, f"dist.broadcast(weight.clone(), 0)\n    {SPLIT}"),),
    ),
    (
        "changes the weight",
        "must leave its inputs as they were",
        ((SPLIT, "q, k, v = weight.mul_(2).div(2).split"),),
    ),
]

ENTER = "Enter.apply(x, self.group) @ self.qkv.T"
READ = "(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))"
CORE = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
BLOCKS = "torch.cat([block.chunk(n)[rank] for block in qkv.chunk(3)])"
KEEP = "proj.chunk(n, dim=1)[rank].clone()"
GATHER = """parts = [torch.empty_like({0}) for _ in range(self.group.size())]
        dist.all_gather(parts, {0}.detach(), group=self.group)
        """

MODULE = [
    ("no f", "that is only this rank's part of dX", ((ENTER, "x @ self.qkv.T"),)),
    ("no g", "that is only this rank's term of Y", (("        dist.all_reduce(y, group=group)\n", ""),)),
    (
        "averages Y",
        "Y is divided by 3",
        (("dist.all_reduce(y, group=group)", "dist.all_reduce(y, group=group)\n        y /= 3"),),
    ),
    (
        "g sums backward, too",
        "3 times too large: all ranks go on with the same Y",
        (
            (
                "        return grad, None\n###",
                "        grad = grad.clone()\n        dist.all_reduce(grad)\n        return grad, None\n###",
            ),
        ),
    ),
    (
        "an f for each of q, k and v",
        "is all that backward needs: one f for q, k and v",
        ((ENTER, "torch.cat([Enter.apply(x, self.group) @ w.T for w in self.qkv.chunk(3)], -1)"),),
    ),
    (
        "f averages",
        "dX is divided by 3",
        (
            (
                "dist.all_reduce(grad, group=ctx.group)",
                "dist.all_reduce(grad, group=ctx.group)\n        grad /= 3",
            ),
        ),
    ),
    ("cuts qkv into runs", "the rows were cut into 3 runs", ((BLOCKS, "qkv.chunk(n)[rank].clone()"),)),
    (
        "splits proj by its outputs",
        "that is a split of proj by its outputs",
        ((KEEP, "proj.chunk(n)[rank].clone()"),),
    ),
    ("holds all of qkv", "the rank holds the whole qkv", ((BLOCKS, "qkv.clone()"),)),
    ("holds all of proj", "the rank holds the whole proj", ((KEEP, "proj.clone()"),)),
    (
        "keeps the whole qkv beside",
        "Keep only this rank's part",
        (("self.group, self", "self.whole = qkv\n        self.group, self"),),
    ),
    ("not causal", "tokens see later ones", ((CORE, CORE.replace("True", "False")),)),
    ("no scale", "by the square root of head_dim", ((CORE, CORE.replace("True", "True, scale=1.0")),)),
    ("one large head", "taken for one head", (("(-1, self.head_dim))", "(1, -1))"),)),
    (
        "does not transpose",
        "heads and tokens changed places",
        (
            ("(-1, self.head_dim)).transpose(1, 2)", "(-1, self.head_dim))"),
            ("o.transpose(1, 2).flatten(2)", "o.flatten(2)"),
        ),
    ),
    (
        "reads head by head",
        "read as [heads, 3, head_dim]",
        ((READ, "qkv.unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 3).unbind(1)"),),
    ),
    (
        "gathers the heads as well",
        "is all that forward needs",
        (("return Leave", GATHER.format("o.contiguous()") + "return Leave"),),
    ),
    (
        "gathers the weight",
        "forward moved the weight",
        (("qkv = Enter", GATHER.format("self.qkv") + "qkv = Enter"),),
    ),
    (
        "sums outside of autograd",
        "autograd finds no way back",
        (
            (
                "Leave.apply(o.transpose(1, 2).flatten(2) @ self.proj.T,",
                "Leave.forward(self, (o.transpose(1, 2).flatten(2) @ self.proj.T).detach(),",
            ),
        ),
    ),
    ("takes any number of heads", "Expected ValueError", (("if num_heads % n:", "if False:"),)),
    (
        "the package's own",
        "comes from the package",
        whole("from tpcourse.models import Attention as ParallelAttention\n"),
    ),
]

OWN = "list(range(head * copies, (head + 1) * copies))"
SUM = "dist.all_reduce(total, group=holders)"
GUARD = "if group.rank() in ranks and copies > 1:"

COPIES = [
    ("sums nothing", "each copy kept its own gradient", ((SUM, "pass"),)),
    (
        "sums over all",
        "all 3 ranks were summed",
        (("    for head", "    dist.all_reduce(total)\n    return total\n    for head"),),
    ),
    (
        "sums the wrong ranks",
        "hold a copy of the same KV head follow each other",
        ((OWN, "list(range(head, group.size(), num_kv_heads))"),),
        4,
    ),
    ("averages", "the copies' gradients were averaged", ((SUM, f"{SUM}\n            total /= copies"),)),
    (
        "sums into its input",
        "must leave its inputs as they were",
        (("total = grad.clone()", "total = grad"),),
    ),
    (
        "gathers all ranks' gradients",
        "that hold this head",
        (
            (
                "    for head",
                "    parts = [torch.empty_like(grad) for _ in range(group.size())]\n"
                "    dist.all_gather(parts, total)\n"
                "    first = group.rank() // copies * copies\n"
                "    return sum(parts[first : first + copies])\n    for head",
            ),
        ),
    ),
    (
        "sums twice",
        "is enough",
        ((SUM, f"{SUM}\n            dist.all_reduce(total.clone(), group=holders)"),),
    ),
]

WRONG = [Wrong("shard_qkv", *answer) for answer in SHARD]
WRONG += [Wrong("ParallelAttention", *answer) for answer in MODULE]
WRONG += [Wrong("kv_gradient", *answer) for answer in COPIES]
