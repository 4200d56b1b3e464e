"""Canaries: each private name of Inductor that fxmem uses does what it is used for."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from fxmem.compiled import levers, lower
from fxmem.compiled.backward_values import MOST_READS_AT_ONCE, MOST_READS_AT_ONCE_ON_CPU
from fxmem.compiled.kernels import MOST_READS
from fxmem.errors import InfeasibleBudgetError
from fxmem.fake.attention import torch_release
from fxmem.torch_private import FakeTensorMode
from tests.compiled.models import transposed_and_summed
from tests.compiled.seat import in_the_seat


def test_custom_partitioner_fn_is_called_with_the_joint_graph_after_inductors_own_passes() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    in_the_seat(lambda *given: seen.append(given), model, torch.randn(4, 8))
    joint, num_outputs, static = seen[0]
    targets = [n.target for n in joint.graph.nodes]
    assert num_outputs == 1
    assert list(static) == [0, 1]
    assert torch.ops.prims.inductor_seeds.default in targets, "dropout is seeds and what is computed from them"
    assert "tangents_1" in targets


def lowered(function: Callable[..., Any], *args: Any, pulled: Any = contextlib.nullcontext) -> lower.Wrapper:
    """Return the wrapper of the forward of ``function``, made in the context that ``pulled()`` returns."""
    wrappers: list[lower.Wrapper] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        forward, _ = default_partition(joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)
        with pulled():
            wrappers.append(lower.lowered_forward(forward, num_outputs))

    in_the_seat(look, function, *args)
    return wrappers[0]


def pulled_or_not(pulled: bool) -> Any:
    return functools.partial(levers.Levers().pulled, is_backward=False) if pulled else contextlib.nullcontext


def test_the_wrapper_of_a_graph_is_code_that_runs_on_fakes_and_no_kernel_is_compiled() -> None:
    wrapper = lowered(nn.Linear(8, 8), torch.randn(4, 8))
    calls: list[Any] = []
    with FakeTensorMode():
        outputs = lower.function_of(wrapper, lambda *call: calls.append(call))(
            [torch.empty(8, 8), torch.empty(8), torch.empty(4, 8)]
        )
    assert tuple(outputs[0].shape) == (4, 8)
    assert calls == []


def num_kernels_of(wrapper: lower.Wrapper, *inputs: torch.Tensor) -> int:
    calls: list[Any] = []
    with FakeTensorMode():
        lower.function_of(wrapper, lambda *call: calls.append(call))([torch.empty(each.shape) for each in inputs])
    return len(calls)


@pytest.mark.parametrize(("tight", "num_kernels"), [(False, 1), (True, 2)])
def test_what_reads_the_same_is_one_kernel_unless_a_backward_is_tight(tight: bool, num_kernels: int) -> None:
    pulled = functools.partial(levers.Levers(tightness=int(tight)).pulled, is_backward=True)
    x = torch.randn(64, 64, requires_grad=True)
    wrapper = lowered(lambda x: (x.sin() @ x.detach(), x.tanh()), x, pulled=pulled)
    assert num_kernels_of(wrapper, x) == num_kernels


@pytest.mark.parametrize(("tight", "num_kernels"), [(False, 1), (True, 2)])
def test_get_scheduled_num_args_decides_whether_kernels_on_end_are_one_function(tight: bool, num_kernels: int) -> None:
    pulled = functools.partial(levers.Levers(tightness=int(tight)).pulled, is_backward=True)
    inputs = [torch.randn(64, width, requires_grad=True) for width in (64, 48)]
    wrapper = lowered(lambda x, y: (x.sin(), y.tanh()), *inputs, pulled=pulled)
    assert num_kernels_of(wrapper, *inputs) == num_kernels


def drawn_once(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.rand_like(x)
    return (x * drawn) @ x.detach(), (x.detach() @ x.detach()) * drawn


@pytest.mark.parametrize(("tight", "num_kernels"), [(False, 1), (True, 2)])
def test_can_fuse_vertical_decides_whether_what_is_read_with_what_is_drawn_is_made_early(
    tight: bool, num_kernels: int
) -> None:
    pulled = functools.partial(levers.Levers(tightness=int(tight)).pulled, is_backward=True)
    x = torch.randn(64, 64, requires_grad=True)
    assert num_kernels_of(lowered(drawn_once, x, pulled=pulled), x) == num_kernels


def test_choices_of_the_users_own_are_asked_in_a_tight_backward_too() -> None:
    class Apart(InductorChoices):
        can_fuse_vertical = staticmethod(lambda *args: False)

    @contextlib.contextmanager
    def pulled() -> Iterator[None]:
        with V.set_choices_handler(Apart()), levers.Levers(tightness=1).pulled(is_backward=True):
            yield

    x = torch.randn(64, 64, requires_grad=True)
    assert num_kernels_of(lowered(drawn_once, x, pulled=pulled), x) == 3


def test_a_value_is_written_from_as_many_buffers_on_as_inductor_is_set_to() -> None:
    """Inductor's settings as they are: what a backward writes is told by them."""
    assert inductor_config.realize_reads_threshold == MOST_READS
    if torch_release() >= (2, 13):  # before, of any device by one setting
        assert inductor_config.realize_acc_reads_threshold is None
        assert inductor_config.realize_cpu_acc_reads_threshold == MOST_READS_AT_ONCE_ON_CPU
        assert inductor_config._realize_acc_reads_threshold_default == MOST_READS_AT_ONCE


@pytest.mark.parametrize("tight", [False, True])
def test_a_buffer_is_held_for_a_later_one_unless_a_backward_is_tight(tight: bool) -> None:
    pulled = functools.partial(levers.Levers(tightness=int(tight)).pulled, is_backward=True)
    x = torch.randn(64, 64, requires_grad=True)
    wrapper = lowered(lambda x: (x @ x.detach()) @ x.detach() @ x.detach(), x, pulled=pulled)
    assert ("# reuse" in wrapper.source) is not tight


@pytest.mark.parametrize("pulled", [False, True])
def test_check_outer_fusion_loop_level_attr_decides_whether_tiles_share_a_local_buffer(pulled: bool) -> None:
    inputs = (torch.randn(64, 64, requires_grad=i == 0) for i in range(5))
    wrapper = lowered(transposed_and_summed, *inputs, pulled=pulled_or_not(pulled))
    assert ("local_buffer_data" in wrapper.source) is (not pulled and torch_release() < (2, 14))


@pytest.mark.parametrize("pulled", [False, True])
def test_find_nodes_prefer_channels_last_decides_whether_an_inputs_copy_is_saved(pulled: bool) -> None:
    model, x = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))), torch.randn(2, 8, 16, 16)
    wrapper = lowered(model, x, pulled=pulled_or_not(pulled))
    first, second = model.parameters()
    with FakeTensorMode():
        inputs = [torch.empty(each.shape) for each in (first, x, second)]  # in the order in which they are read
        outputs = lower.function_of(wrapper, lambda *call: None)(list(inputs))
    assert [any(out is given for out in outputs) for given in inputs] == [pulled] * 3


def test_a_triton_kernel_tells_which_arguments_it_changes() -> None:
    source = """
@triton_heuristics.pointwise(inductor_meta={'mutated_arg_names': ['in_out_ptr0', 'out_ptr1'], 'no_x_dim': False})
@triton.jit
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, out_ptr1, xnumel, XBLOCK : tl.constexpr):
    pass
"""
    assert lower._changed_places("triton_poi_fused_add_0", source) == [0, 2]
    with pytest.raises(AssertionError, match="is not in its source"):
        lower._changed_places("another", source)


@pytest.mark.slow
def test_a_backward_writes_over_saved_tensors_that_are_said_to_be_donated() -> None:
    codes: list[str] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        _, backward = default_partition(joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)
        num_saved = sum("tangents" not in n.name for n in backward.graph.find_nodes(op="placeholder"))
        assert inductor_graph.get_donated_idxs() is None
        for donated in ((), range(num_saved)):
            codes.append(lower.lowered_backward(backward, num_saved, tuple(donated)).source)

    in_the_seat(look, lambda x: x.sin().sin().sin(), torch.randn(64, 64, requires_grad=True))
    assert "# reuse" not in codes[0]
    assert "# reuse" in codes[1]


def test_scalar_code_alone_asks_for_the_same_memory_as_all_code() -> None:
    sources: list[str] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        forward, _ = default_partition(joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static)
        for generate in (lower._scalar_code, lower.CppScheduling.codegen_node):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lower, "_scalar_code", generate)
                sources.append(lower.lowered_forward(forward, num_outputs).source)

    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    in_the_seat(look, lambda x, w: (x @ w).softmax(-1).tanh() @ w, x, weight)
    scalar, whole = (re.sub(r"r\'\'\'.*?\'\'\'", "", source, flags=re.DOTALL) for source in sources)
    assert "at::vec::Vectorized" not in sources[0]
    assert "at::vec::Vectorized" in sources[1]
    assert scalar == whole


def test_duplicates_and_what_nobody_reads_are_removed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two, _ = (graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(3))
    graph.output((one, two))
    module = lower.without_duplicates(fx.GraphModule({}, graph))
    assert [n.op for n in module.graph.nodes] == ["placeholder", "call_function", "output"]


def test_settings_are_read_where_torch_keeps_them() -> None:
    plain = lower.settings_now()
    assert not any(getattr(plain, name) for name in lower.Settings.__dataclass_fields__)
    with (
        inductor_config.patch({"triton.cudagraphs": True, "cpp_wrapper": True, "memory_planning": True}),
        functorch_config.patch(activation_memory_budget=0.5),
        dynamo_config.patch(compiled_autograd=True),
    ):
        changed = lower.settings_now()
    assert changed == lower.Settings(True, True, True, True, None, 0.5)


def test_another_size_and_what_follows_a_graph_break_are_compilations_of_their_own() -> None:
    frames: list[Any] = []
    breaks: list[bool] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        frames.append(lower.compilation_now())
        breaks.append(lower.breaks_off(graph_module))
        return graph_module.forward

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    function = torch.compile(whole, backend=backend, dynamic=False)
    function(torch.ones(2)), function(torch.ones(3))
    torch.compile(broken, backend=backend)(torch.ones(2))
    assert None not in frames
    assert len(set(map(id, frames))) == 4
    assert breaks == [False, False, True, False]


def test_a_graph_is_lowered_while_another_one_is_compiled() -> None:
    """Their fakes are of two modes, and Inductor goes by the one that is being traced."""
    forwards: list[tuple[fx.GraphModule, int]] = []
    sources: list[str] = []

    def look(joint: fx.GraphModule, num_outputs: int, static: Any) -> None:
        forward, _ = default_partition(joint, None, num_fwd_outputs=num_outputs)
        forwards.append((forward, num_outputs))
        source = lower.lowered_forward(*forwards[0]).source
        sources.append(re.sub(r"# AOT ID.*\n", "", source))

    for _ in range(2):
        torch._dynamo.reset()
        in_the_seat(look, lambda x: x.sin().exp().sum(), torch.ones(4, requires_grad=True))
    assert sources[0] == sources[1]


def test_our_errors_pass_through_dynamo() -> None:
    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        raise lower.passing_dynamo(InfeasibleBudgetError(1, 2))

    with pytest.raises(InfeasibleBudgetError) as caught:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (1, 2)
