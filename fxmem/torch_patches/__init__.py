"""Every place where fxmem replaces or sets something of torch's (or of transformers'), each a named context manager.

Each says what it replaces, why, and the torch versions it is for; each has a canary in
tests/torch_patches/test_canaries.py, which fails where a patch has no effect any more or is needed no longer. Callers
keep the logic, the replacing is here.
"""

from fxmem.torch_patches.autograd import (
    as_in_training,
    calls_of_backward_shown_to,
    calls_shown_to,
    casts_stay_at_hand,
    graphs_shown_to,
    in_batched_backward,
    outermost_in_autocast,
    outside_of_batch,
    without_cached_parametrizations,
    without_hooks_on_saved_tensors,
)
from fxmem.torch_patches.calls import (
    backward_hooks_made_by,
    batch_norms_by,
    calls_run_by,
    calls_told_to,
    forward_hooks_exchanged,
    function_applies_by,
    tensor_hooks_set_by,
)
from fxmem.torch_patches.dynamo import without_dynamo
from fxmem.torch_patches.export import compiler_says_eager, nodes_shown_to, quiet, regions_left, tracing_answered_by
from fxmem.torch_patches.fakes import ctc_losses, grouped_matmuls, no_value_checks
from fxmem.torch_patches.optimizers import clipping_refused, fakes_for_each, steady_scaler, without_optimizer_hooks
from fxmem.torch_patches.replacing import PATCHES
from fxmem.torch_patches.stand_in import cuda_asked, cuda_for_fakes, kernels_on_cuda

__all__ = [
    "PATCHES",
    "as_in_training",
    "backward_hooks_made_by",
    "batch_norms_by",
    "calls_run_by",
    "calls_told_to",
    "clipping_refused",
    "compiler_says_eager",
    "ctc_losses",
    "cuda_asked",
    "cuda_for_fakes",
    "fakes_for_each",
    "forward_hooks_exchanged",
    "function_applies_by",
    "calls_of_backward_shown_to",
    "calls_shown_to",
    "casts_stay_at_hand",
    "graphs_shown_to",
    "grouped_matmuls",
    "in_batched_backward",
    "outermost_in_autocast",
    "kernels_on_cuda",
    "no_value_checks",
    "nodes_shown_to",
    "outside_of_batch",
    "quiet",
    "regions_left",
    "steady_scaler",
    "tensor_hooks_set_by",
    "tracing_answered_by",
    "without_cached_parametrizations",
    "without_dynamo",
    "without_hooks_on_saved_tensors",
    "without_optimizer_hooks",
]
