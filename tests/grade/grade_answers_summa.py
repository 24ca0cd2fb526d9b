"""Known-wrong solutions of lesson 09."""

from grade_answers import Wrong, whole

X_T = "x_t = x.contiguous() if columns.rank() == t else torch.empty_like(x)"
A_T = "a_t = a.contiguous() if rows.rank() == t else torch.empty_like(a)"
SEND_X = "dist.broadcast(x_t, group=columns, group_src=t)"
SEND_A = "dist.broadcast(a_t, group=rows, group_src=t)"
ADD = "y = y + x_t @ a_t"
GATHER = """
def summa_forward(x, a, rows, columns):
    xs, as_ = ([torch.empty_like(b) for _ in range(rows.size())] for b in (x, a))
    dist.all_gather(xs, x, group=columns)
    dist.all_gather(as_, a, group=rows)
    return sum(x_t @ a_t for x_t, a_t in zip(xs, as_))
"""
EVERYWHERE = """
def summa_forward(x, a, rows, columns):
    q, y = rows.size(), 0
    for t in range(q):
        for i in range(q):
            came = x.clone()
            dist.broadcast(came, i * q + t)
            x_t = came if rows.rank() == i else x_t if i else came
        a_t = a.clone()
        dist.broadcast(a_t, group=rows, group_src=t)
        y = y + x_t @ a_t
    return y
"""

FORWARD = [
    (
        "its own blocks alone",
        "the product of this rank's own blocks",
        (
            (SEND_X, ""),
            (SEND_A, ""),
            ("y = 0", "return x @ a"),
        ),
    ),
    ("the last step alone", "one step's product alone", ((ADD, "y = x_t @ a_t"),)),
    (
        "panels in opposite orders",
        "the panels do not match",
        (
            (A_T, "s = rows.size() - 1 - t\n        " + A_T.replace("== t", "== s")),
            (SEND_A, SEND_A.replace("=t", "=s")),
        ),
        9,
    ),
    (
        "each rank begins with itself",
        "calls do not fit each other",
        (
            (
                "for t in range(rows.size()):",
                "for s in range(rows.size()):\n        t = (s + columns.rank()) % rows.size()",
            ),
        ),
    ),
    (
        "X along columns, A along rows",
        "X went along the grid's columns and A along its rows",
        (
            (X_T, X_T.replace("columns", "rows")),
            (SEND_X, SEND_X.replace("columns", "rows")),
            (A_T, A_T.replace("rows", "columns")),
            (SEND_A, SEND_A.replace("rows", "columns")),
        ),
    ),
    (
        "receives into its own blocks",
        "a rank's own block was overwritten",
        ((X_T, "x_t = x"), (A_T, "a_t = a")),
    ),
    ("receives into X alone", "a rank's own block was overwritten", ((X_T, "x_t = x"),)),
    ("averages", "divided by 2: the steps", (("return y", "return y / rows.size()"),)),
    ("gathers rows and columns", "SUMMA broadcasts blocks and reduces blocks", whole(GATHER)),
    ("broadcasts to everybody", "neither a row nor a column of the grid", whole(EVERYWHERE)),
    (
        "sends X twice",
        "a product takes",
        ((SEND_X, f"{SEND_X}\n        dist.broadcast(x_t.clone(), group=columns, group_src=t)"),),
    ),
    (
        "sums Y along the row as well",
        "Y's stays",
        (("return y", "dist.reduce(y.clone(), group=rows, group_dst=0)\n    return y"),),
    ),
    ("float32 to receive", "float32", ((X_T, X_T.replace("torch.empty_like(x)", "torch.empty(x.shape)")),)),
    (
        "the package's own",
        "comes from the package",
        whole("from tpcourse.schemes.summa import ab as summa_forward\n"),
    ),
]

SEND = "dist.broadcast(a_t, group=ctx.rows, group_src=t)"
A_HERE = "a_t = a.contiguous() if ctx.rows.rank() == t else torch.empty_like(a)"
X_HERE = "x_t = x.contiguous() if ctx.columns.rank() == t else torch.empty_like(x)"
SEND_BACK = "dist.broadcast(x_t, group=ctx.columns, group_src=t)"
SUM_X = "dist.reduce(term, group=ctx.columns, group_dst=t)"
SUM_A = "dist.reduce(term, group=ctx.rows, group_dst=t)"
LAST = "ctx.columns.size() - 1 - t"
KEEP = """ctx.rows, ctx.columns = rows, columns
        ctx.panels = []
        for t in range(rows.size()):
            came = a.clone()
            dist.broadcast(came, group=rows, group_src=t)
            ctx.panels.append(came)
        """

BACKWARD = [
    ("no sum for dX", "dX_it is the sum over the ranks of row i", ((SUM_X, "pass"),)),
    ("no sum for dA", "dA_tj is the sum over the ranks of column j", ((SUM_A, "pass"),)),
    (
        "sums dX on the wrong root",
        "the sum of step t ended on another rank",
        (
            (SUM_X, f"dist.reduce(term, group=ctx.columns, group_dst={LAST})"),
            (
                "if ctx.columns.rank() == t:\n                dx",
                f"if ctx.columns.rank() == {LAST}:\n                dx",
            ),
        ),
    ),
    (
        "sums dA on the wrong root",
        "the sum of step t ended on another rank",
        (
            (SUM_A, f"dist.reduce(term, group=ctx.rows, group_dst={LAST})"),
            (
                "if ctx.rows.rank() == t:\n                da",
                f"if ctx.rows.rank() == {LAST}:\n                da",
            ),
        ),
    ),
    (
        "its own A for dX",
        "dY_ij times this rank's own A_ij transposed",
        (
            ("term = dy @ a_t.T", "term = dy @ a.T"),
            (SUM_X, "pass"),
        ),
    ),
    (
        "its own X for dA",
        "this rank's own X_ij transposed times dY_ij",
        (
            ("term = x_t.T @ dy", "term = x.T @ dy"),
            (SUM_A, "pass"),
        ),
    ),
    ("dA as nn.Linear keeps it", "expected shape", (("return dx, da,", "return dx, da.T,"),)),
    (
        "sums on all ranks",
        "SUMMA broadcasts blocks and reduces blocks",
        ((SUM_X, "dist.all_reduce(term, group=ctx.columns)"),),
    ),
    ("averages dA", "dA is divided by 2", (("return dx, da,", "return dx, da / 2,"),)),
    (
        "keeps the panels for backward",
        "keep your own blocks and gather again",
        (
            (
                "ctx.rows, ctx.columns = rows, columns\n        return summa_forward(x, a, rows, columns)",
                KEEP + "return sum_kept(ctx.panels, x, columns)",
            ),
            (
                "class SummaFunction",
                "def sum_kept(panels, x, columns):\n    y = 0\n    for t, a_t in enumerate(panels):\n"
                "        x_t = x.clone()\n        dist.broadcast(x_t, group=columns, group_src=t)\n"
                "        y = y + x_t @ a_t\n"
                "    return y\n\n\nclass SummaFunction",
            ),
        ),
    ),
    (
        "moves dY",
        "Y's stays",
        (
            (
                "x, a = ctx.saved_tensors",
                "x, a = ctx.saved_tensors\n        dist.broadcast(dy.clone(), group=ctx.rows, group_src=0)",
            ),
        ),
    ),
    (
        "changes X",
        "must leave its inputs as they were",
        (
            (X_HERE, "x_t = x.mul_(1).contiguous() if ctx.columns.rank() == t else torch.empty_like(x)"),
            ("return dx, da,", "x.mul_(2)\n        return dx, da,"),
        ),
    ),
    ("no gradient of A", "da did not come back", (("return dx, da,", "return dx, None,"),)),
]

WRONG = [Wrong("summa_forward", *answer[:3], *(answer[3:] or (4,))) for answer in FORWARD]
WRONG += [Wrong("SummaFunction", *answer[:3], *(answer[3:] or (4,))) for answer in BACKWARD]
