"""Elementwise ops run again without autograd: their kernels must not look at whether it is on."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fxmem
from fxmem.profiling.profile import _is_elementwise
from fxmem.runtime.inplace_ops import FORMS
from fxmem.runtime.recompute import SavedInRerun
from tests.exactness import same_bits

NUM_SAMPLES = 3
NOT_HERE = ("as_strided", "jiterator")
"""Ops that read what a copy of their input lacks, or run on CUDA only."""


class _Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:  # what autograd saves
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def _run(op, sample, requires_grad):
    """What ``op`` makes of copies of the sample's tensors, and the kernels it runs."""

    def copied(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(requires_grad and value.is_floating_point()).clone()

    with torch.set_grad_enabled(requires_grad):
        value, args, kwargs = tree_map(copied, (sample.input, sample.args, sample.kwargs))
        with _Record() as record:
            output = op(value, *args, **kwargs)
    return [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)], record.ops


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_the_dispatcher_calls_pointwise_make_the_same_bits_without_autograd(dtype):
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    compared = set()
    for op in op_db:
        if dtype not in op.supported_dtypes("cpu") or op.name.startswith(NOT_HERE):
            continue
        for sample, _ in zip(op.sample_inputs("cpu", dtype), range(NUM_SAMPLES), strict=False):
            without, kernels = _run(op, sample, requires_grad=False)
            if len(kernels) != 1 or not _is_elementwise(kernels[0]):
                break
            with_autograd, same_kernels = _run(op, sample, requires_grad=True)
            assert kernels == same_kernels, op.name
            for expected, actual in zip(with_autograd, without, strict=True):
                assert expected.stride() == actual.stride(), op.name
                assert same_bits(expected, actual), op.name
            compared.update(kernels)
    assert len(compared) > 100
    assert torch.ops.aten.hardswish.default in compared  # which ATen has not tagged


def test_forms_written_over_their_input_make_the_same_bits_without_autograd():
    x = torch.randn(37, 5)
    for form in FORMS.values():
        assert _is_elementwise(form)
        others = (torch.randn(37, 5),) if form.__name__ in ("add_", "sub_") else ()
        with SavedInRerun():
            expected = form(x.clone().requires_grad_() * 1, *others)
        assert expected.requires_grad
        assert same_bits(expected.detach(), form(x.clone(), *others)), form.__name__


class _Gated(torch.nn.Module):
    """Elementwise ops that save what they make, and one that is not between them."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x):
        hidden = self.inside(x)
        gate = torch.sigmoid(hidden) * torch.tanh(hidden).pow(2)
        return self.outside(self.norm(gate * hidden).exp())


def test_recipes_of_elementwise_ops_need_no_autograd_and_others_do():
    model, batch = _Gated(), (torch.randn(32, 16),)
    optimized = fxmem.optimize(model, batch, policy=[(lambda _: True, "recompute")], cost="a100")
    table = optimized.graph_module.fxmem_tape.table
    used = {p for p, recompute in enumerate(table.recomputes) if recompute is not None}
    assert table.elementwise
    assert used - table.elementwise
    for p in used:
        names = {node.name.rstrip("_0123456789") for node in table.recomputes[p].nodes}
        assert (p in table.elementwise) == names.isdisjoint({"linear", "layer_norm"}), names


def test_what_runs_without_autograd_inside_a_backward_that_is_differentiated_is_right():
    model, batch = _Gated().double(), torch.randn(8, 16, dtype=torch.double)
    optimized = fxmem.optimize(model, (batch,), policy=[(lambda _: True, "recompute")], cost="a100")
    penalties = []
    for way in (model, optimized):
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(way(x).square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), list(model.parameters())))
    for expected, actual in zip(*penalties, strict=True):
        assert same_bits(expected, actual)
