"""Which lines of a source file put values under a name: ``losses.append(loss)``, ``total += loss``, ``log["x"] = loss``.

In: a file and a name, of a variable or an attribute. Out: :class:`FillingLine` objects, from the syntax tree. Aliases of
the name are not followed.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass

FILLING = {"append": "append", "appendleft": "append", "extend": "append", "insert": "insert", "add": "add"}
"""By name, methods of containers that take a value, and the verb to say it with."""


@dataclass(frozen=True, slots=True)
class FillingLine:
    """A statement that puts a value under a name."""

    statement: str
    """Its source, on one line."""
    place: str
    """``file.py:31``."""
    verb: str
    """``append``, ``insert``, ``add`` or ``store``."""
    value: str
    """The source of the value; empty where it is no name, attribute or entry."""

    @property
    def remedy(self) -> str:
        """What to write instead."""
        if not self.value:
            return f"{self.verb} .detach() of it instead, or .item()"
        return f"{self.verb} {self.value}.detach() instead, or {self.value}.item()"


def filling_lines(filename: str, name: str, first: int = 0, last: int | None = None) -> list[FillingLine]:
    """Return the statements of a file, or of its lines ``first`` to ``last``, that put values under ``name``."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and first <= node.lineno <= (last or node.lineno):
            for verb, value in _fillings(node, name):
                if _is_cut_off(value):
                    continue
                plain = isinstance(value, ast.Name | ast.Attribute | ast.Subscript)
                text = (ast.get_source_segment(source, value) or "") if plain else ""
                statement = " ".join((ast.get_source_segment(source, node) or "").split())
                found.append(FillingLine(statement, f"{os.path.basename(filename)}:{node.lineno}", verb, text))
    return found


def _fillings(node: ast.stmt, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a statement puts under ``name``, with the verb."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=holder, attr=method), args=[*_, value])):
            if method in FILLING and _last_name(holder) == name:
                yield FILLING[method], value
        case ast.AugAssign(target=target, value=value) if _last_name(target) == name:
            yield "add", value
        case ast.Assign(targets=[ast.Subscript() as target], value=value) if _last_name(target) == name:
            yield "store", value
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, right=right)) if _last_name(target) == name:
            if name in (_last_name(left), _last_name(right)):
                yield "add", right if _last_name(left) == name else left


def _is_cut_off(value: ast.expr) -> bool:
    """True for what has no graph: ``loss.item()``."""
    match value:
        case ast.Call(func=ast.Attribute(attr="item" | "detach" | "tolist" | "numpy")) | ast.Constant():
            return True
    return False


def _last_name(node: ast.expr) -> str:
    """Return the last name of ``a``, ``a.b`` or ``a.b["c"]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
