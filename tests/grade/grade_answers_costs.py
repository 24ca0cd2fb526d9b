"""Known-wrong solutions of lesson 08."""

from grade_answers import Wrong, whole

ONE, SPLIT = "return 2 * u + 2 * u", "return 2 * u + 3 * u"
CUBE = "return 2 * (q - 1) / q * (x + a + y) / q**2 * e"
U = "(P - 1) / P * n * h * e"

VOLUMES = [
    ("forward alone", "that is half: backward sends as well", ((ONE, "return 2 * u"),)),
    ("an all-reduce costs once", "an all-reduce costs twice", ((ONE, "return u + u"),)),
    ("sends itself what it has", "the share (P-1)/P is missing", ((U, "n * h * e"),)),
    ("keeps the gathered X", "X is gathered again in backward", ((SPLIT, "return 4 * u"),)),
    ("counts numbers", "each takes e bytes", ((U, "(P - 1) / P * n * h"), ("q**2 * e", "q**2"))),
    ("forgets the weights", "the weights are missing", (("x + a + y)", "x + y)"),)),
    ("forgets the sums", "the sums of Y are missing", (("x + a + y)", "x + a)"),)),
    ("shares over all ranks", "not (P-1)/P", (("(q - 1) / q *", "(P - 1) / P *"),)),
    ("gathers the whole", "not all of it", ((" / q**2 * e", " * e"),)),
    ("counts what a rank has", "gathered it is 1/q² of the whole", ((" / q**2 * e", " / q**3 * e"),)),
    ("takes all linears to be h wide", "4 times as wide", (("n * 4 * h", "n * h"),)),
    ("the cube forward alone", "that is forward alone", ((CUBE, CUBE.replace("return 2 *", "return")),)),
    ("returns nothing", "it is not written yet, or its return is missing", (("return ", ""),)),
    (
        "asks the package",
        "comes from the package",
        whole(
            "def mlp_volume(layout, n, h, P, e):\n    from tpcourse import predict\n"
            "    return predict.OneD(P).entering_linear(n, h, 4 * h, False, e)\n"
        ),
    ),
]

ROWS, GOALS = "torch.stack([1 / times, sizes / times], 1)", "torch.ones(len(times), 1, dtype=times.dtype)"
RESULT = "torch.stack([alpha, beta])"

FITS = [
    (
        "least absolute error",
        "which the largest decides",
        ((ROWS, "torch.stack([torch.ones_like(sizes), sizes], 1)"), (GOALS, "times[:, None]")),
    ),
    (
        "half of the weight",
        "each error is divided by its time, then squared",
        ((ROWS, "torch.stack([times**-0.5, sizes * times**-0.5], 1)"), (GOALS, "times[:, None] ** 0.5")),
    ),
    ("beta first", "α comes first", ((RESULT, "torch.stack([beta, alpha])"),)),
    ("the bandwidth", "that is the bandwidth 1/β", ((RESULT, "torch.stack([alpha, 1 / beta])"),)),
    (
        "through zero",
        "need not go through zero",
        ((RESULT, "torch.stack([0 * alpha, (sizes / times).sum() / (sizes / times).square().sum()])"),),
    ),
    (
        "through zero, absolute",
        "need not go through zero",
        ((RESULT, "torch.stack([0 * alpha, (sizes * times).sum() / sizes.square().sum()])"),),
    ),
    (
        "the smallest message",
        "not the time of the smallest message",
        ((RESULT, "torch.stack([times[0], beta])"),),
    ),
    ("seconds", "expected", ((RESULT, "torch.stack([alpha, beta]) / 1e6"),)),
    ("two numbers, not a tensor", "where a tensor is expected", ((RESULT, "float(alpha), float(beta)"),)),
    (
        "changes the times",
        "the function must leave its inputs",
        (("return torch", "times.mul_(2)\n    return torch"),),
    ),
    (
        "the package's own",
        "comes from the package",
        whole("from tpcourse.measure import fit_alpha_beta\n"),
    ),
]

WRONG = [Wrong("mlp_volume", *answer, ranks=1) for answer in VOLUMES]
WRONG += [Wrong("fit_alpha_beta", *answer, ranks=1) for answer in FITS]
