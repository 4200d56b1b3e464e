"""Which private names of torch fxmem uses, found in its syntax trees: ``python -m tests.private_names [folder]``.

A *private name* is one of these; a component is private if it begins with one underscore and not with two:

1. An import from torch whose dotted path has a private component: ``torch.utils._pytree.tree_leaves``. It counts where it
   is imported and once more wherever its name is read.
2. A chain of attributes that begins at a module of torch, or at a module's variable that stands for one, and has a private
   component: ``torch._C._functorch.peek_interpreter_stack``. It counts whole.
3. An attribute with a private name of anything else than ``self`` or ``cls``, where nothing in the package defines such a
   name, or torch's best-known classes have it too: ``._version``. So does a keyword, and a string that is but such a name,
   as ``getattr`` and the patches take it, f-strings with ``*`` for what is filled in, and a string that is a dotted path
   of torch's with a private component.

Not private are torch's operators (``torch.ops.aten._unsafe_view``): they are what graphs are made of, named by a
schema that torch keeps.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent / "fxmem"
_PATH = re.compile(r"torch(\.\w+)+")
_NAME = re.compile(r"_[a-z*]\w*(\*\w*)*", re.IGNORECASE)
_OF_OTHERS = frozenset(
    {
        "_asdict",  # of named tuples
        "_replace",
        "_bytes",  # a suffix
        "_c10d_functional",  # a namespace of operators
        "_fxmem",  # of an optimized module's class
    }
)
_OF_TORCH = {
    name for kind in (torch.Tensor, torch.nn.Module, torch.fx.Node, torch.optim.Optimizer) for name in dir(kind)
}
"""Names that are torch's on anything but ``self``, even if the package defines such too."""


def is_private(component: str) -> bool:
    return component.startswith("_") and not component.startswith("__") and component != "_"


def private_path(path: str) -> bool:
    """True if ``path`` is torch's and has a private component, and is no operator."""
    components = path.split(".")
    return components[0] == "torch" and components[1:2] != ["ops"] and any(map(is_private, components))


def names_in(package: Path = PACKAGE) -> dict[str, Counter[str]]:
    """Return by private name the number of its uses by file, as a path relative to ``package``."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    own = ({name for tree in trees.values() for name in _defined(tree)} - _OF_TORCH) | _OF_OTHERS
    found: dict[str, Counter[str]] = {}
    for path, tree in trees.items():
        for name in _Uses(tree, own).names:
            found.setdefault(name, Counter())[path.relative_to(package).as_posix()] += 1
    return dict(sorted(found.items()))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that ``tree`` defines: functions, classes, variables, attributes of ``self``, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_operator(name: str) -> bool:
    return "*" not in name and name not in _OF_TORCH and hasattr(torch.ops.aten, name)


class _Uses(ast.NodeVisitor):
    """The private names that one file uses, one entry a use."""

    def __init__(self, tree: ast.Module, own: set[str]) -> None:
        self.names: list[str] = []
        self._own = own
        self._stands_for: dict[str, str] = {}
        """By name of the file: the path of torch's that it was imported as, or set to."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._bind(node)
        for node in tree.body:
            self._bind_variable(node)
        self._skipped = {id(part) for node in ast.walk(tree) for part in _docstrings(node)}
        self.visit(tree)

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if path.split(".")[0] != "torch":
                continue
            if isinstance(node, ast.ImportFrom) or alias.asname:
                self._stands_for[alias.asname or alias.name] = path
            else:
                self._stands_for["torch"] = "torch"
            if private_path(path):
                self.names.append(path)

    def _bind_variable(self, node: ast.stmt) -> None:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        path = None if value is None else self._path(value)
        if path is not None and len(targets) == 1 and isinstance(targets[0], ast.Name):
            self._stands_for[targets[0].id] = path

    def _path(self, node: ast.expr) -> str | None:
        """Return the dotted path of torch's that ``node`` is, if it is one."""
        if isinstance(node, ast.Name):
            return self._stands_for.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self._path(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is not None:
            if private_path(path):
                self.names.append(re.sub(r"(\.__\w+__)+$", "", path))
            return
        if is_private(node.attr) and node.attr not in self._own and not _is_self(node.value):
            self.names.append(f".{node.attr}")
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        path = self._stands_for.get(node.id)
        if path is not None and isinstance(node.ctx, ast.Load) and private_path(path):
            self.names.append(path)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None and is_private(node.arg) and node.arg not in self._own:
            self.names.append(f".{node.arg}")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and id(node) not in self._skipped:
            self._string(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        self._string("".join(map(str, parts)))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def _string(self, text: str) -> None:
        if _PATH.fullmatch(text) and private_path(text):
            self.names.append(text)
        elif _NAME.fullmatch(text) and is_private(text) and text not in self._own and not _is_operator(text):
            self.names.append(f".{text}")


def _docstrings(node: ast.AST) -> Iterator[ast.expr]:
    """Yield strings that say something to the reader only: those that are a statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value


def main(package: Path = PACKAGE) -> None:
    found = names_in(package)
    for name, uses in found.items():
        print(f"{name}  {uses.total()}  {' '.join(uses)}")
    files = {file for uses in found.values() for file in uses}
    print(f"{len(found)} names, {sum(uses.total() for uses in found.values())} uses, {len(files)} files")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
