"""The Python code that Inductor generates for a graph, as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.cpp_pybinding\(.*?\bkernel\(([^)]*)\)(.*?)^'''\)", re.MULTILINE | re.DOTALL
)
"""A C++ kernel: its name, its parameters, and its body."""
_BUFFER = re.compile(r"\bbuf\d+\b")
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "loses_writes", bool(self._added_to_and_unread()))

    def _added_to_and_unread(self) -> set[str]:
        scattering = {name: _added_to(parameters, body) for name, parameters, body in _KERNEL.findall(self.source)}
        unread = set[str]()
        for code in self._calls():
            name, _, given = code.partition("(")
            if not code.startswith(_NOT_READING):
                unread.difference_update(_BUFFER.findall(code))
            args = given.rstrip(")").split(", ")
            unread |= {args[place] for place in scattering.get(name, ()) if _BUFFER.fullmatch(args[place])}
        return unread

    def _calls(self) -> Iterator[str]:
        """Yield the lines of the code that runs a graph, without comments."""
        for line in self.source.partition("def call(")[2].splitlines():
            yield line.partition("#")[0].strip()


def _added_to(parameters: str, body: str) -> list[int]:
    """Return the places of a kernel's parameters that it adds to and does not read."""
    names = [each.split()[-1] for each in parameters.split(",")]
    adds = (rf"\b{name}\[[^\n]*\] \+= |\batomic_add\w*\(&{name}\b" for name in names)
    reads = (rf"= {name}\[|\bloadu\({name}\b" for name in names)
    return [
        place
        for place, (add, read) in enumerate(zip(adds, reads, strict=True))
        if re.search(add, body) and not re.search(read, body)
    ]
