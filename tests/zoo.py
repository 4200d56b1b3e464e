"""Real models that nobody here wrote, small enough to train a step on one CPU thread in a second or two.

What goes in: a name. What comes out: a `ZooModel`, whose `build()` makes the module in training mode and whose
`batch(size)` makes its inputs. Both draw from torch's global generator, so the caller decides: `torch.manual_seed`
first. Weights are random and nothing is downloaded. Dropout and stochastic depth are on wherever the architecture has
them. The libraries are imported when a model is built, not before.

    entry = zoo.get("gpt2_2l")
    torch.manual_seed(0)
    model = entry.build()
    args, kwargs = entry.batch(entry.default_batch)
    entry.loss(model(*args, **kwargs)).backward()

Run `python -m tests.zoo` for a table of all entries with the seconds of one eager step.
"""

import sys
import time

import torch

from tests.zoo_entries import entries
from tests.zoo_models import ZooModel

__all__ = ["FAMILIES", "ZooModel", "get", "names"]


def get(name: str) -> ZooModel:
    """The entry called `name`; KeyError lists the known names."""
    try:
        return _ZOO[name]
    except KeyError:
        raise KeyError(f"no model {name!r} in the zoo; known: {', '.join(_ZOO)}") from None


def names(family: str | None = None) -> list[str]:
    """The names of all entries, or of one family's, in a fixed order."""
    if family is not None and family not in FAMILIES:
        raise KeyError(f"no family {family!r} in the zoo; known: {', '.join(FAMILIES)}")
    return [name for name, entry in _ZOO.items() if family in (None, entry.family)]


_ZOO = {entry.name: entry for entry in entries()}
FAMILIES = tuple(dict.fromkeys(entry.family for entry in _ZOO.values()))


# ---------------------------------------------------------------------------------------------------------------------
# python -m tests.zoo
# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints name, family, parameters, batch, loss and the seconds of the second eager step of every entry."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or names():
        entry = get(name)
        torch.manual_seed(0)
        start = time.perf_counter()
        model = entry.build()
        build_seconds = time.perf_counter() - start
        args, kwargs = entry.batch(entry.default_batch)
        for _ in range(2):
            model.zero_grad()
            start = time.perf_counter()
            loss = entry.loss(model(*args, **kwargs))
            loss.backward()
            step_seconds = time.perf_counter() - start
        without_gradient = sum(p.requires_grad and p.grad is None for p in model.parameters())
        num_parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{name:30} {entry.family:12} {num_parameters / 1e6:7.2f} M parameters  batch {entry.default_batch}  "
            f"loss {loss.item():8.4f}  build {build_seconds:5.2f} s  step {step_seconds:5.2f} s  "
            f"unused parameters {without_gradient}",
            flush=True,
        )


if __name__ == "__main__":
    main()
