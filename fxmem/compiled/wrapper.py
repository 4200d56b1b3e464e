"""The Python code that Inductor generates for a graph, as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(.*?\bkernel\(([^)]*)\)(.*?)^'''\)", re.MULTILINE | re.DOTALL
)
"""A C++ kernel: its name, its parameters, and its body."""
_BUFFER = re.compile(r"\bbuf\d+\b")
_REUSE = re.compile(r"(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b.*; del \2")
"""A buffer that takes over the memory of another, whose name goes."""
_OUT = re.compile(r"\bout=(?:reinterpret_tensor\()?buf\d+")
_NOT_READING = ("del ", "assert_")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The Python code that Inductor generates for one graph."""

    source: str
    constants: Mapping[str, Any]
    """Global names of it that are set from outside."""

    loses_writes: bool = field(init=False)
    """Whether a C++ kernel adds to a buffer that nothing reads afterwards: what should have read it ran before (NOTE
    [Scatters before convolutions] in :mod:`fxmem.compiled.levers`)."""

    @staticmethod
    def without_ops(graph_module: fx.GraphModule) -> Wrapper:
        """Return the same for a graph that hands on what it is given, for which Inductor generates none."""
        *inputs, outputs = graph_module.graph.nodes
        names = [node.name for node in inputs]
        handed_on: Any = outputs.args[0]
        lines = (
            "def call(args):",
            f"    {', '.join(names)}, = args",
            "    args.clear()",
            f"    return ({', '.join(map(str, handed_on))},)",
        )
        return Wrapper("\n".join(lines), {})

    def __post_init__(self) -> None:
        object.__setattr__(self, "loses_writes", bool(self._added_to_and_unread()))

    def _added_to_and_unread(self) -> set[str]:
        kernels = {name: _Kernel.of(parameters, body) for name, parameters, body in _KERNEL.findall(self.source)}
        unread, taken_over, lost = set[str](), set[str](), set[str]()
        for code in self._calls():
            if code.startswith(_NOT_READING):
                continue
            if (reuse := _REUSE.fullmatch(code)) is not None:
                new, old = reuse.groups()
                if old in unread | taken_over:
                    unread.discard(old)
                    taken_over.add(new)  # unread until what it is passed to tells whether it is written over or read
                continue
            read, added = _read_and_added(code, kernels)
            named = set(_BUFFER.findall(code))
            lost |= taken_over & named - read
            taken_over -= named
            unread = unread - read | added
        return unread | taken_over | lost

    def _calls(self) -> Iterator[str]:
        """Yield the lines of the code that runs a graph, without comments."""
        for line in self.source.partition("def call(")[2].splitlines():
            yield line.partition("#")[0].strip()


class _Kernel(NamedTuple):
    reads: tuple[bool, ...]
    """By place: whether it reads what is in this argument when it is called."""
    adds: tuple[int, ...]
    """The places of those that it adds to and does not read afterwards."""

    @staticmethod
    def of(parameters: str, body: str) -> _Kernel:
        names = [each.split()[-1] for each in parameters.split(",")]
        adds = (place for place, name in enumerate(names) if _adds_last(name, body))
        return _Kernel(tuple(name.startswith("in_") for name in names), tuple(adds))


def _read_and_added(code: str, kernels: Mapping[str, _Kernel]) -> tuple[set[str], set[str]]:
    """Return the buffers that a line reads, and those that it adds to without reading them afterwards."""
    kernel = kernels.get(code.partition("(")[0])
    if kernel is None:
        return set(_BUFFER.findall(_OUT.sub("", code))), set()
    call: Any = ast.parse(code, mode="eval").body
    buffers = [_BUFFER.findall(ast.unparse(arg)) for arg in call.args]
    read = {name for names, reads in zip(buffers, kernel.reads, strict=True) if reads for name in names}
    return read, {name for place in kernel.adds for name in buffers[place]}


def _adds_last(name: str, body: str) -> bool:
    """True if a kernel adds to a parameter, and does not read it after that."""
    added = list(re.finditer(rf"\b{name}\[[^\n]*\] \+= |\batomic_add\w*\(&{name}\b", body))
    return bool(added) and not re.search(rf"= {name}\[|\bloadu\({name}\b", body[added[-1].end() :])
