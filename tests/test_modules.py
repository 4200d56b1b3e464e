"""torch's own list of modules, with torch's own sample inputs: each trains to the eager bits, or is refused by name."""

import pytest

from tests.module_table import Outcome, infos, outcome
from tests.tiers import first_of_each

UNTRAINABLE = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}
"""With these sample inputs eager itself has nothing to train, or raises."""

REFUSED = {
    "nn.CTCLoss": "data is not allocated",
    "nn.GaussianNLLLoss": "values in tensors",
}
"""Modules that cannot be captured, and what the message names."""


def file_of(name: str) -> str:
    """Where torch defines it: one file each for convolutions, norms, losses, and so on."""
    return infos()[name].module_cls.__module__


@pytest.mark.parametrize("name", first_of_each(infos(), file_of, *REFUSED, "nn.LSTM", quick=8))
def test_module_trains_to_the_same_bits_or_is_refused_by_name(name: str) -> None:
    seen = outcome(infos()[name])
    if name in REFUSED:
        assert seen.verdict == "refused", seen.why
        assert REFUSED[name] in seen.why
    else:
        assert seen == Outcome(name, "untrainable" if name in UNTRAINABLE else "passed", seen.why), seen.why


def test_at_least_95_percent_of_the_trainable_modules_pass() -> None:
    trainable = infos().keys() - UNTRAINABLE
    assert len(trainable - REFUSED.keys()) >= 0.95 * len(trainable)
