"""Documents that name tests: does the test exist? Read from the source, so that a test of any tier can be asked for."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def problem_of(test: str) -> str:
    """Why `path::function` or `path::function[id]` is no test that runs; "" when it is one."""
    path, _, name = test.partition("::")
    name, _, identity = name.removesuffix("]").partition("[")
    if not path.startswith("tests/") or not Path(path).name.startswith("test_"):
        return f"{test}: pytest does not look into {path}"
    if not (ROOT / path).is_file():
        return f"{test}: there is no {path}"
    functions, words = _content(path)
    if name not in functions or not name.startswith("test_"):
        return f"{test}: {path} has no such test"
    if any(mark in decorator for decorator in functions[name] for mark in ("mark.skip", "mark.xfail")):
        return f"{test}: it is skipped or expected to fail"
    if identity and identity not in words:
        return f"{test}: {path} has no case '{identity}'"
    return ""


@cache
def _content(path: str) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Functions of a file with their decorators, and every string in it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {
        node.name: [ast.unparse(item) for item in node.decorator_list]
        for node in tree.body
        if isinstance(node, FUNCTIONS)
    }
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return functions, frozenset(value for value in constants if isinstance(value, str))
