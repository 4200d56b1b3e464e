"""What the command line takes for granted, with where it is from: printed with every answer."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.ir import PlainData


@dataclass(frozen=True, slots=True)
class Assumed(PlainData):
    """A value that was not given on the command line."""

    what: str
    value: str
    source: str
    """Where it is from: a default, the environment, a library's configuration."""

    def __str__(self) -> str:
        return f"{self.what} {self.value} ({self.source})"
