"""torch's own list of modules, with torch's own sample inputs: each trains to the eager bits."""

import pytest

from tests.module_table import Outcome, infos, outcome
from tests.tiers import first_of_each

UNTRAINABLE = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
"""With these sample inputs eager itself has nothing to train, or raises."""

LOOKING = ("nn.CTCLoss", "nn.GaussianNLLLoss")
"""Modules that look at values, each in a way of its own."""


def file_of(name: str) -> str:
    """Where torch defines it: one file each for convolutions, norms, losses, and so on."""
    return infos()[name].module_cls.__module__


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each(infos(), file_of, *LOOKING, "nn.LSTM", quick=8))
def test_module_trains_to_the_same_bits(name: str) -> None:
    seen = outcome(infos()[name])
    assert seen == Outcome(name, "untrainable" if name in UNTRAINABLE else "passed", seen.why), seen.why
