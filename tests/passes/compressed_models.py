"""Helpers of the tests of saved-tensor compression."""

from torch import Tensor

from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile
from fxmem.passes.compress_saved import with_compressed_saves
from fxmem.planners.simulate import drop_all
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from tests.exactness import Checked, passing

PLANS = (drop_all, passing)


# -- poolings, paddings and convolutions -------------------------------------------------------------------------------


def lean_profile(checked: Checked, x: Tensor) -> GraphProfile:
    lean = with_compressed_saves(checked.profiled, lambda node: False, least_share=0.0)
    return profile(lean, Inputs.of((x,), {}), PRESETS["cpu"].seconds).profile
