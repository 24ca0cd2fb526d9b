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


def statements(text: str, label: str) -> list[tuple[types.CodeType, str]]:
    """The top-level imports, definitions and assignments of a cell, one by one: compiled, and how it begins.

    ``label`` names the cell in tracebacks.

    Bare calls, loops and ``with`` blocks are a learner's experiments and checks, and are left out, as are
    magics. A cell that starts with ``%%`` is left out whole. Raises SyntaxError.
    """
    if text.lstrip().startswith("%%"):
        return []
    lines = ["" if line.lstrip().startswith(("%", "!", "?")) else line for line in text.split("\n")]
    tree = ast.parse("\n".join(lines), label)
    return [
        (compile(ast.Module([part], []), label, "exec"), ast.unparse(part).split(":")[0])
        for part in tree.body
        if isinstance(part, DEFINING)
    ]
