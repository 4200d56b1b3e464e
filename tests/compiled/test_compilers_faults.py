"""Faults of Inductor that compiled steps do not have.

Gradients that are scattered and then go through a convolution, which it may read before they are there; and what is handed
on in a local buffer of one row between loops that take several rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fxmem
from fxmem.compiled.wrapper import Wrapper
from tests.compiled.models import OPTIONS, transposed_and_summed

KERNELS = """
scatter_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    out_ptr0[static_cast<int64_t>(x0)] += in_ptr0[static_cast<int64_t>(x0)];
}
''')

copy_1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    out_ptr0[static_cast<int64_t>(x0)] = in_ptr0[static_cast<int64_t>(x0)];
}
''')

add_2 = async_compile.cpp_pybinding(['float*', 'const float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0, const float* in_ptr0)
{
    in_out_ptr0[static_cast<int64_t>(x0)] = in_out_ptr0[static_cast<int64_t>(x0)] + in_ptr0[static_cast<int64_t>(x0)];
}
''')

read_and_scatter_3 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, float* out_ptr1)
{
    auto tmp0 = out_ptr0[static_cast<int64_t>(x0)];
    out_ptr1[static_cast<int64_t>(x0)] = tmp0;
    out_ptr0[static_cast<int64_t>(x0)] += in_ptr0[static_cast<int64_t>(x0)];
}
''')

    def call(self, args):
        buf0 = empty_strided_cpu((4, ), (1, ), torch.float32)
"""
SCATTER, COPY = "        scatter_0(primals_1, buf0)\n", "        copy_1(buf0, buf1)\n"
REUSE = "        buf2 = reinterpret_tensor(buf0, (2, 2), (2, 1), 0); del buf0  # reuse\n"
RETURN = "        return (buf1, buf2, )\n"


@pytest.fixture(autouse=True)
def _on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, Inductor leaves a scatter to the op
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("calls", "loses"),
    [
        (SCATTER + COPY + "        del buf0\n        return (buf1, )\n", False),
        (COPY + SCATTER + "        del buf0  # buf0 is not read\n        return (buf1, )\n", True),
        (COPY + SCATTER + "        return (buf1, buf0, )\n", False),
        (
            COPY + SCATTER + "        extern_kernels.mm(buf0, primals_2, out=buf2)\n        return (buf1, buf2, )\n",
            False,
        ),
        (COPY + "        return (buf1, )\n", False),
        (COPY + SCATTER + REUSE + "        extern_kernels.mm(primals_1, primals_2, out=buf2)\n" + RETURN, True),
        (COPY + SCATTER + REUSE + "        extern_kernels.mm(buf2, primals_2, out=buf3)\n" + RETURN, False),
        (COPY + SCATTER + REUSE + "        copy_1(primals_1, buf2)\n" + RETURN, True),
        (COPY + "        scatter_0(reinterpret_tensor(primals_1, (4, ), (1, ), 0), buf0)\n" + RETURN, True),
        (COPY + SCATTER + REUSE + "        add_2(buf2, primals_1)\n" + RETURN, False),
        (SCATTER + COPY + REUSE + "        copy_1(primals_1, buf2)\n" + RETURN, False),
        ("        read_and_scatter_3(primals_1, buf0, buf1)\n        return (buf1, )\n", True),
    ],
)
def test_what_is_added_to_a_buffer_and_not_read_is_lost(calls: str, loses: bool) -> None:
    assert Wrapper(KERNELS + calls, {}).loses_writes is loses


@pytest.mark.slow
@pytest.mark.parametrize("num_convolutions", [1, 2])
def test_a_convolution_gets_the_gradient_that_a_scatter_makes(num_convolutions: int) -> None:
    """Of two convolutions, torch 2.13 gives the gradients of all zeros by itself, and of one the right ones."""
    torch.manual_seed(0)
    layers = [
        layer for i in range(num_convolutions) for layer in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d((7, 7)), nn.Flatten(), nn.Linear(392, 10))
    x = torch.randn(2, 3, 2, 2)
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    optimized = fxmem.optimize(model, x, budget="1GB", loss_fn=lambda output: output.square().mean(), **OPTIONS)
    optimized(x).square().mean().backward()
    for one, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-4, atol=1e-6)
    assert num_convolutions > 1 or not optimized.fxmem.report.layouts_left


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, *others: torch.Tensor) -> torch.Tensor:
        return transposed_and_summed(self.weight.sin(), *others).square().mean()


@pytest.mark.slow
def test_loops_in_tiles_hand_on_all_their_rows() -> None:
    """Torch 2.13 gives loss and gradients that are a few times too large."""
    torch.manual_seed(0)
    model, others = Transposed(), tuple(torch.randn(64, 64) for _ in range(4))
    expected = model(*others)
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    found = fxmem.optimize(model, others, budget="1GB", loss_fn=torch.sum, **OPTIONS)(*others)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    (made,) = torch.autograd.grad(found, [model.weight])
    torch.testing.assert_close(made, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
