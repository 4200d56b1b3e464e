"""The order of the pipeline, read off the package's import statements: each step knows the ones before it.

Only the syntax trees are read, nothing is imported. An import counts wherever it stands, in a function or under
`TYPE_CHECKING` too: what a module mentions, it depends on.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# A module imports only from modules above it. A subpackage (planners, report) has one place; inside it any order
# without a cycle will do.
ORDER = (
    "types",
    "errors",
    "cache",
    "cuda",
    "traces",
    "track",
    "budget",
    "effects",
    "truer",
    "fake",
    "values",
    "looks",
    "switches",
    "regions",
    "bindings",
    "autocast",
    "views",
    "replay",
    "step",
    "optimizing",
    "runtime",
    "structures",
    "captured",
    "opaque",
    "frozen",
    "overwriting",
    "lean_ops",
    "faithful",
    "capture",
    "signature",
    "parts",
    "batch",
    "timing",
    "observe",
    "ticks",
    "rerun",
    "profile",
    "measure",
    "simulate",
    "check",
    "policy",
    "inplace",
    "lean",
    "planners",
    "sizes",
    "rewrite",
    "verify",
    "report",
    "pipeline",
    "frontier",
    "estimate",
    "plans",
    "module",
    "__init__",
    "__main__",
)

# These see even less than the order allows.
ONLY = {
    "track": {"types", "errors", "cuda", "traces"},
    "effects": {"types", "errors"},
    "truer": set(),
    "fake": {"types", "errors", "effects", "truer"},
    "autocast": set(),
    "views": {"errors"},
    "replay": {"errors", "autocast", "views"},
    "runtime": {"errors", "switches", "autocast", "views", "replay"},
    "step": {"types", "errors", "autocast"},
    "optimizing": {"errors", "cuda", "track", "fake", "step"},
    "values": {"types", "errors"},
    "looks": {"errors"},
    "structures": {"errors"},
    "captured": {"types", "errors", "values", "autocast", "structures"},
    "faithful": {"errors", "effects", "fake", "values", "switches", "autocast", "structures", "captured", "opaque"},
    "capture": {
        "errors",
        "effects",
        "fake",
        "values",
        "looks",
        "switches",
        "regions",
        "bindings",
        "autocast",
        "structures",
        "captured",
        "opaque",
        "frozen",
        "faithful",
    },
    "timing": set(),
    "observe": {
        "types",
        "errors",
        "track",
        "fake",
        "regions",
        "frozen",
        "views",
        "step",
        "optimizing",
        "captured",
        "timing",
    },
    "ticks": {"types", "errors", "observe"},
    "rerun": {"errors", "track", "fake", "autocast", "views", "replay", "captured"},
    "profile": {
        "types",
        "fake",
        "regions",
        "views",
        "replay",
        "bindings",
        "step",
        "optimizing",
        "overwriting",
        "lean_ops",
        "captured",
        "observe",
        "ticks",
        "rerun",
    },
}

# A planner works on plain integers and floats, and so does the judge of its plans.
WITHOUT_TORCH = ("simulate", "planners")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fxmem"


# ---------------------------------------------------------------------------------------------------------------------
# Reading the imports
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """`path:line` imports `target`; `target` is a module inside the package, or the first name of one outside."""

    path: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} imports {self.target}"


def read_imports(package: Path) -> dict[str, list[Import]]:
    """The imports of every module of `package`, by dotted name; the package itself is called `<name>.__init__`."""
    paths = {_module_name(package, path): path for path in sorted(package.rglob("*.py"))}
    return {name: list(_imports_of(name, path, package.name, paths)) for name, path in paths.items()}


def _module_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def _imports_of(name: str, path: Path, package: str, modules: dict[str, Path]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from fxmem.planners import chen` is an import of fxmem.planners.chen if that is a module.
            base = _absolute(node, name, path)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(path, node.lineno, _resolve(target, package, modules))


def _absolute(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The module after `from`, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    is_subpackage = path.name == "__init__.py" and parts[-1] != "__init__"
    parent = parts[: len(parts) - node.level + is_subpackage]
    return ".".join([*parent, *([node.module] if node.module else [])])


def _resolve(target: str, package: str, modules: dict[str, Path]) -> str:
    """The longest prefix of `target` that is a module here; outside the package, its first name."""
    parts = target.split(".")
    if parts[0] != package:
        return parts[0]
    for length in range(len(parts), 1, -1):
        if ".".join(parts[:length]) in modules:
            return ".".join(parts[:length])
    return f"{package}.__init__"


def _place(module: str) -> str:
    """The name under which ORDER lists a module: fxmem.planners.chen is at `planners`."""
    return module.split(".")[1]


# ---------------------------------------------------------------------------------------------------------------------
# The rules
# ---------------------------------------------------------------------------------------------------------------------


def order_violations(package: Path) -> list[str]:
    """What breaks ORDER or ONLY, one sentence each."""
    found = []
    for module, imports in read_imports(package).items():
        place = _place(module)
        if place not in ORDER:
            found.append(f"{module} has no place in ORDER: put it there")
            continue
        for imported in imports:
            if not imported.target.startswith(f"{package.name}."):
                continue
            target = _place(imported.target)
            if target == place or target not in ORDER:
                continue
            if ORDER.index(target) > ORDER.index(place):
                found.append(f"{imported}, which comes after {place}")
            elif target not in ONLY.get(place, ORDER):
                found.append(f"{imported}, but {place} imports only {', '.join(sorted(ONLY[place]))}")
    return found


def cycles(package: Path) -> list[str]:
    """One sentence for each module that imports itself by way of others."""
    imports = read_imports(package)
    found = []
    for module in imports:
        chain = _chain(imports, module, module)
        if chain:
            found.append(" -> ".join(chain))
    return found


def torch_violations(package: Path) -> list[str]:
    """How torch is reached from WITHOUT_TORCH, one chain for each module that reaches it.

    Importing a submodule runs the package's own `__init__` first, and that one does import torch. It says nothing about
    what the submodule needs, so only modules named in import statements count.
    """
    imports = read_imports(package)
    imports.pop(f"{package.name}.__init__", None)
    starts = [module for module in imports if _place(module) in WITHOUT_TORCH]
    chains = [_chain(imports, module, "torch") for module in starts]
    return [" -> ".join(chain) for chain in chains if chain]


def _chain(imports: dict[str, list[Import]], start: str, goal: str) -> list[str]:
    """A shortest chain of imports from `start` to `goal`, or nothing."""
    queue = [[start]]
    seen: set[str] = set()
    for chain in queue:
        for imported in imports.get(chain[-1], []):
            if imported.target == goal:
                return [*chain, goal]
            if imported.target not in seen:
                seen.add(imported.target)
                queue.append([*chain, imported.target])
    return []


# ---------------------------------------------------------------------------------------------------------------------
# The package keeps them
# ---------------------------------------------------------------------------------------------------------------------


def test_imports_follow_the_order_of_the_pipeline() -> None:
    assert order_violations(PACKAGE) == []


def test_imports_have_no_cycle() -> None:
    assert cycles(PACKAGE) == []


def test_simulator_and_planners_do_without_torch() -> None:
    assert torch_violations(PACKAGE) == []


# ---------------------------------------------------------------------------------------------------------------------
# The rules see what breaks them
# ---------------------------------------------------------------------------------------------------------------------


def _write_package(root: Path, files: dict[str, str]) -> Path:
    package = root / "pkg"
    for name, text in {"__init__.py": "import torch\n", "types.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    "statement",
    [
        "import pkg.rewrite",
        "from pkg import rewrite",
        "from pkg.rewrite import emit",
        "from . import rewrite",
        "from .rewrite import emit",
        "def f():\n    from pkg.rewrite import emit",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.rewrite import emit",
    ],
)
def test_an_import_against_the_order_is_found(tmp_path: Path, statement: str) -> None:
    package = _write_package(tmp_path, {"simulate.py": statement, "rewrite.py": ""})
    line = statement.count("\n") + 1
    assert order_violations(package) == [f"simulate.py:{line} imports pkg.rewrite, which comes after simulate"]


def test_an_import_of_the_package_itself_is_against_the_order(tmp_path: Path) -> None:
    package = _write_package(tmp_path, {"profile.py": "from pkg import __version__"})
    assert order_violations(package) == ["profile.py:1 imports pkg.__init__, which comes after profile"]


def test_relative_imports_in_a_subpackage_are_resolved(tmp_path: Path) -> None:
    files = {
        "planners/__init__.py": "from .chen import plan",
        "planners/chen.py": "from ..rewrite import emit\nfrom ..types import Plan",
        "rewrite.py": "",
    }
    package = _write_package(tmp_path, files)
    assert order_violations(package) == ["chen.py:1 imports pkg.rewrite, which comes after planners"]


def test_an_import_that_the_order_allows_but_only_forbids_is_found(tmp_path: Path) -> None:
    package = _write_package(tmp_path, {"profile.py": "import pkg.runtime", "runtime.py": ""})
    only = ", ".join(sorted(ONLY["profile"]))
    message = f"profile.py:1 imports pkg.runtime, but profile imports only {only}"
    assert order_violations(package) == [message]


def test_a_module_without_a_place_is_found(tmp_path: Path) -> None:
    package = _write_package(tmp_path, {"helpers.py": ""})
    assert order_violations(package) == ["pkg.helpers has no place in ORDER: put it there"]


def test_a_cycle_inside_a_subpackage_is_found(tmp_path: Path) -> None:
    files = {
        "planners/__init__.py": "",
        "planners/a.py": "from . import b",
        "planners/b.py": "from . import a",
    }
    package = _write_package(tmp_path, files)
    assert order_violations(package) == []
    assert cycles(package) == [
        "pkg.planners.a -> pkg.planners.b -> pkg.planners.a",
        "pkg.planners.b -> pkg.planners.a -> pkg.planners.b",
    ]


def test_torch_is_found_directly_and_through_another_module(tmp_path: Path) -> None:
    files = {
        "types.py": "import math",
        "profile.py": "from torch import nn",
        "simulate.py": "from pkg.types import Plan\nfrom pkg import profile",
        "planners/__init__.py": "",
        "planners/chen.py": "import torch.fx",
    }
    package = _write_package(tmp_path, files)
    assert torch_violations(package) == [
        "pkg.planners.chen -> torch",
        "pkg.simulate -> pkg.profile -> torch",
    ]
