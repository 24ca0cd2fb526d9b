"""Which statements of a notebook's cell are run when it is graded."""

import ast
import types

DEFINING = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
    ast.Try,
)

PLAIN = ("%%time", "%%capture")


def statements(text: str, label: str) -> list[tuple[types.CodeType, str]]:
    """The top-level imports, definitions and assignments of a cell, one by one: compiled, and how it begins.

    ``label`` names the cell in tracebacks.

    Bare calls, loops and ``with`` blocks are a learner's experiments and checks, and are left out, as are
    magics. A cell that starts with ``%%`` is left out whole, unless the magic runs it as it stands. Raises
    SyntaxError.
    """
    if text.lstrip().startswith("%%") and text.split()[0] not in PLAIN:
        return []
    tree = _parsed(text, label)
    return [
        (compile(ast.Module([part], []), label, "exec"), ast.unparse(part).split(":")[0])
        for part in tree.body
        if isinstance(part, DEFINING)
    ]


def _parsed(text: str, label: str) -> ast.Module:
    """Magics are passed over where Python cannot read them: a line of an expression may begin with % or !=,
    too.
    """
    lines = text.split("\n")
    while True:
        try:
            return ast.parse("\n".join(lines), label)
        except SyntaxError as error:
            line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
            if not (line.lstrip().startswith(("%", "!", "?")) or line.rstrip().endswith("?")):
                raise
            lines[error.lineno - 1] = line[: len(line) - len(line.lstrip())] + "pass"
