"""Importing the libraries that models come from, also beside a CPU build of torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_declared: list[torch.library.Library] = []  # a Library takes its schemas along when it is collected


def import_torchvision() -> Any:
    """Return torchvision, on a CPU build of torch too.

    There its compiled operators may not load, and the import stops where ``nms`` gets a fake kernel. The schemas alone
    let it through; no model here calls the operators. Where they load, nothing is declared.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return importlib.import_module("torchvision")


def import_library(name: str) -> Any:
    """Return the library called ``name``, after torchvision."""
    import_torchvision()  # the others import it too
    return importlib.import_module(name)
