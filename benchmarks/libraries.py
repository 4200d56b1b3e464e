"""Importing the libraries that models come from, also beside a CPU build of torch."""

from __future__ import annotations

import importlib
from typing import Any

from fxmem.cli.models import beside_torchvision


def import_torchvision() -> Any:
    """Return torchvision, on a CPU build of torch too (:func:`fxmem.cli.models.beside_torchvision`)."""
    return beside_torchvision(lambda: importlib.import_module("torchvision"))


def import_library(name: str) -> Any:
    """Return the library called ``name``, after torchvision."""
    import_torchvision()  # the others import it too
    return importlib.import_module(name)
