"""What fxmem uses of Inductor that torch does not call public: all of it is here and in :mod:`fxmem.compiled.levers`.

In: graphs. Out: compiled functions whose partitioner is ours, and the Python code that Inductor would run for a graph (its
*wrapper*), without any kernel compiled. Each name is listed in docs/architecture.md and has a canary in
tests/compiled/test_lower.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import ShortenTraceback, Unsupported, UserError
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling, CppVecKernel, OuterLoopFusedSchedulerNode
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V

from fxmem.compiled.levers import Levers
from fxmem.compiled.scratch import process_state
from fxmem.compiled.wrapper import Wrapper
from fxmem.disk_cache import digest
from fxmem.errors import CaptureError, FxMemError, first_lines
from fxmem.progress import collected_afterwards
from fxmem.torch_patches.replacing import replaced_here
from fxmem.torch_private import FakeTensor

Partition = Callable[[fx.GraphModule, int, Sequence[int] | None], tuple[fx.GraphModule, fx.GraphModule]]
"""Called with a joint graph, the number of the forward's outputs, and the places of inputs at fixed addresses."""


def _in_keys() -> str:
    """Return what stands for the partitioner in keys of Inductor's cache, which lack what a backward may write over."""
    settings = "inputs saved as they are, no local buffers under tiles, backwards apart, in time, lean and in order"
    return f"fxmem, {settings}, donated: {functorch_config.donated_buffer}"


class Partitioner(CustomPartitionerFn):
    """Our partitioner as Inductor asks for one."""

    def __init__(self, partition: Partition) -> None:
        self._partition: Partition | None = partition

    def leave(self) -> None:
        """Let go of the function: Inductor keeps its settings with what it compiled."""
        self._partition = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert self._partition is not None
        return self._partition(gm, kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices"))

    def uuid(self) -> str:
        """Graphs are cached as they are after partitioning, so that all plans may share one key; not with plain Inductor,
        whose forward lays out what is saved (:mod:`fxmem.compiled.levers`)."""
        return _in_keys()

    def __reduce__(self) -> tuple[Any, ...]:
        """Inductor pickles its settings for the key of its cache."""
        return str, (_in_keys(),)


def compiled(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    levers: Callable[[], Levers] = Levers,
    explain: Callable[[BaseException], None] = lambda error: None,
) -> Callable[..., Any]:
    """Return Dynamo's graph compiled by Inductor, with ``partition`` in the partitioner's seat.

    AOTAutograd's cache is off: it would hand out the plan of another budget. ``levers``: asked for after ``partition``.
    ``explain``: given the errors of memory of the code, in forwards and backwards.
    """
    now = functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
    partitioner = Partitioner(partition)

    def inner(part: fx.GraphModule, part_inputs: Sequence[Any], **options: Any) -> Any:
        with levers().pulled(is_backward=options.get("is_backward", False)):
            return _explained(compile_fx_inner(part, part_inputs, **options), explain)

    patches = {"custom_partitioner_fn": partitioner}
    with now:
        try:
            made = compile_fx(graph_module, inputs, inner_compile=inner, config_patches=patches)
        finally:
            partitioner.leave()
    return made  # type: ignore[return-value]


def _explained(made: Any, explain: Callable[[BaseException], None]) -> Any:
    run = getattr(made, "current_callable", None)
    if run is None:  # of a graph without ops, which takes no memory
        return made

    def run_explained(inputs: Any) -> Any:
        try:
            return run(inputs)
        except torch.OutOfMemoryError as error:
            explain(error)
            raise

    made.current_callable = run_explained
    return made


# -- what is set --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """What is set now of that which :mod:`fxmem.compiled.refusals` refuses; False or None where nothing is."""

    cudagraphs: bool
    cpp_wrapper: bool
    memory_planning: bool
    compiled_autograd: bool
    custom_partitioner: object
    low_memory_budget: float | None


def settings_now() -> Settings:
    budget = functorch_config.activation_memory_budget
    return Settings(
        cudagraphs=inductor_config.triton.cudagraphs,
        cpp_wrapper=inductor_config.cpp_wrapper or inductor_config.fx_wrapper,
        memory_planning=inductor_config.memory_planning,
        compiled_autograd=dynamo_config.compiled_autograd,
        custom_partitioner=inductor_config.custom_partitioner_fn,
        low_memory_budget=None if budget >= 1 else budget,
    )


def compilation_now() -> object | None:
    """Return what stands for the compilation that Dynamo is in: one for each size, and another after a graph break."""
    return CompileContext.try_get()


def compiling_alone() -> contextlib.AbstractContextManager[object]:
    """Have no other thread compile in the body, as Dynamo does where it calls a backend."""
    return compile_lock


def breaks_off(graph_module: fx.GraphModule) -> bool:
    """True if a graph from Dynamo ends because it breaks: more of the function follows."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


BREAKS = (Unsupported, UserError)
"""What Dynamo raises where a model is not one graph."""


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """In the body Dynamo passes over what a model logs, where its graph would break, and what breaks it is told.

    Errors: ``CaptureError`` where a model cannot be one graph.
    """
    loggers = {method for method in vars(logging.Logger).values() if callable(method)}
    try:
        with dynamo_config.patch(ignore_logging_functions=dynamo_config.ignore_logging_functions | loggers):
            yield
    except BREAKS as error:
        raise CaptureError(
            f"torch.compile cannot follow the model in one graph, which a budget needs: {first_lines(error)}. "
            'Train it with backend="eager", the default, or by torch.compile(model, backend=fxmem.backend(...)), which '
            "plans several graphs once a step has shown them; or keep what breaks the graph out of its forward"
        ) from error


def passing_dynamo(error: FxMemError) -> FxMemError:
    """Return ``error`` such that Dynamo hands it on as it is, instead of one of its own that quotes it; what Dynamo adds to
    its message is not told."""
    kind, message = type(error), str(error)
    attributes = {"first_useful_frame": None, "__str__": lambda self: message, "__module__": kind.__module__}
    error.__class__ = type(kind.__name__, (kind, ShortenTraceback), attributes)
    return error


def without_duplicates(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Remove from a joint graph what is computed twice, and what nobody reads."""
    graph_module.graph.eliminate_dead_code()
    graph_module.graph = fx_graph_cse(graph_module.graph)
    graph_module.recompile()
    return graph_module


def signature_of(graph_module: fx.GraphModule, *others: object) -> str:
    """Return a key that graphs share whose plans are the same: nodes, shapes, strides, and all settings."""
    values = [str(n.meta.get("val")) + _strides(n.meta.get("val")) for n in graph_module.graph.nodes]
    settings = inductor_config.get_config_copy()
    settings.pop("custom_partitioner_fn", None)
    others = (*others, functorch_config.donated_buffer, process_state())
    return digest(str(graph_module.graph), *values, repr(sorted(settings.items(), key=str)), *map(repr, others))


def _strides(value: Any) -> str:
    return str(value.stride()) if isinstance(value, torch.Tensor) else ""


# -- lowering without kernels ---------------------------------------------------------------------------------------------


def lowered_forward(graph_module: fx.GraphModule, num_outputs: int) -> Wrapper:
    """Return the wrapper of a forward with so many outputs beside saved tensors."""
    num_inputs = len(graph_module.graph.find_nodes(op="placeholder"))
    return _lowered(graph_module, num_outputs, num_inputs, is_backward=False)


def lowered_backward(graph_module: fx.GraphModule, num_saved: int, donated: Sequence[int]) -> Wrapper:
    """Return the wrapper of a backward. ``donated``: places of saved tensors that only it refers to, which it may write
    over where torch lets it."""
    places = list(donated) if functorch_config.donated_buffer else []
    with replaced_here(inductor_graph, "get_donated_idxs", lambda: places):
        return _lowered(graph_module, None, num_saved, is_backward=True)


def _lowered(graph_module: fx.GraphModule, num_visible: int | None, num_fixed: int, *, is_backward: bool) -> Wrapper:
    graph_module = copy.deepcopy(graph_module)
    output = graph_module.graph.output_node()
    visible: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [
        i for i, value in enumerate(visible[:num_visible]) if isinstance(value, fx.Node)
    ]
    inputs = [n.meta["val"] for n in graph_module.graph.find_nodes(op="placeholder")]
    wrappers: list[Wrapper] = []
    with _codes_kept(wrappers), own_context(inputs), collected_afterwards():
        compile_fx_inner(graph_module, inputs, static_input_idxs=tuple(range(num_fixed)), is_backward=is_backward)
    return wrappers[-1] if wrappers else Wrapper.without_ops(graph_module)


def own_context(inputs: Sequence[Any]) -> contextlib.AbstractContextManager[object]:
    """Have torch know the mode of these fakes where none of that mode is compiled: how it partitions depends on it."""
    mode = next((t.fake_mode for t in inputs if isinstance(t, FakeTensor)), None)
    current = TracingContext.try_get()
    is_own = mode is None or (current is not None and current.fake_mode is mode)
    return contextlib.nullcontext() if is_own else tracing(TracingContext(mode))


@contextlib.contextmanager
def _codes_kept(wrappers: list[Wrapper]) -> Iterator[None]:
    """Keep the code of each graph that is lowered in the body; nothing of it is compiled or loaded.

    Inductor does not look where cudagraphs would begin and end, which takes long and changes nothing: they are refused
    (:mod:`fxmem.compiled.refusals`).
    """

    def keep(graph: Any) -> Any:
        code, _ = graph.codegen()
        wrappers.append(Wrapper(code.value, {**graph.constants, **graph.torchbind_constants}))
        return SimpleNamespace(call=lambda args: None, __file__="<not compiled>")

    with (
        replaced_here(inductor_graph.GraphLowering, "compile_to_module", keep),
        replaced_here(CppScheduling, "codegen_node", _scalar_code),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, graph_partition=False),
    ):
        yield


class _ScalarOnly(CppKernelProxy):
    """A C++ kernel of which only the scalar code is generated.

    With it Inductor decides which buffers a kernel needs and which it writes over; the vector code that follows is the
    same once more.
    """

    def __init__(self, kernel_group: Any) -> None:
        super().__init__(kernel_group)  # type: ignore[no-untyped-call]
        self.picked_vec_isa = None  # type: ignore[assignment]


class _ScalarInTiles(CppKernelProxy):
    """The same with the loops' tiles, which tell whether kernels can share an outer loop, and with it buffers."""

    def codegen_functions(self, fn_list: Sequence[Callable[..., Any]], var_sizes_list: Sequence[Any]) -> None:
        functions = [_not_in_vectors(fn) for fn in fn_list]
        super().codegen_functions(functions, var_sizes_list)  # type: ignore[no-untyped-call]


def _not_in_vectors(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*index_vars: Any) -> Any:
        return None if isinstance(V.kernel, CppVecKernel) else function(*index_vars)

    run.original_fn = getattr(function, "original_fn", function)  # type: ignore[attr-defined]  # where it looks for nodes
    return run


def _scalar_code(self: Any, node: Any, generate: Callable[..., Any] = CppScheduling.codegen_node) -> None:
    """Stands for ``CppScheduling.codegen_node``."""
    self.kernel_proxy_cls = _ScalarInTiles if isinstance(node, OuterLoopFusedSchedulerNode) else _ScalarOnly
    generate(self, node)


OnCall = Callable[[Sequence[Any], Sequence[Any]], None]
"""Called with a kernel's arguments and those of them that it changes, which Inductor copies to try the kernel."""


class Kernel:
    """Stands for a kernel in a wrapper that runs on fakes: tells ``on_call`` of its arguments. ``changed``: places of those
    that it changes."""

    def __init__(self, on_call: OnCall, changed: Sequence[int] = ()) -> None:
        self._on_call, self._changed = on_call, changed

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._on_call((*args, *kwargs.values()), [args[place] for place in self._changed])

    run = __call__


class _NoKernels:
    """Stands for Inductor's ``AsyncCompile``."""

    def __init__(self, on_call: OnCall) -> None:
        self._on_call = on_call

    def cpp_pybinding(self, *args: Any, **kwargs: Any) -> Kernel:
        return Kernel(self._on_call)

    def triton(self, name: str, source: str, **kwargs: Any) -> Kernel:
        return Kernel(self._on_call, _changed_places(name, source))

    def wait(self, scope: Any) -> None:
        pass


def _changed_places(name: str, source: str) -> list[int]:
    """Return the places of a Triton kernel's arguments that its source says it changes."""
    declared = re.search(rf"def {name}\(([^)]*)\)", source)
    told = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
    assert declared is not None, f"{name} is not in its source"
    assert told is not None, f"{name} does not tell what it changes"
    names = [each.split(":")[0].strip() for each in declared[1].split(",")]
    return [names.index(each) for each in re.findall(r"'(\w+)'", told[1]) if each in names]


ALLOCATORS = frozenset({"empty_strided_cpu", "empty_strided_cpu_pinned", "empty_strided_cuda"})
"""Names by which a wrapper asks for memory."""


def function_of(wrapper: Wrapper, on_call: OnCall) -> Callable[[list[Any]], Sequence[Any]]:
    """Return the wrapper as a function of a list of inputs, which it empties; its kernels only tell of their calls.

    It is to run under a ``FakeTensorMode``: what it allocates, and ops that are not kernels, are then fakes.
    """
    scope: dict[str, Any] = {"__name__": "fxmem_wrapper", "__file__": "<wrapper>"}
    with replaced_here(async_compile, "AsyncCompile", lambda: _NoKernels(on_call)):
        exec(compile(wrapper.source, "<wrapper>", "exec"), scope)
    scope.update(wrapper.constants)
    scope.update({name: _empty("cuda" if "cuda" in name else "cpu") for name in ALLOCATORS})
    scope.update(assert_size_stride=_check_size_stride, assert_alignment=_nothing, reinterpret_tensor=_reinterpreted)
    for name in ("empty_strided_xpu", "empty_strided_mtia", "alloc_from_pool", "empty_strided_p2p"):
        scope[name] = _refused(name)
    call: Callable[[list[Any]], Sequence[Any]] = scope["call"]
    return call


def _empty(device: str) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _check_size_stride(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], *name: str) -> None:
    expected = [s for s, n in zip(stride, size, strict=True) if n > 1]
    found = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    same = tuple(tensor.shape) == tuple(size) and found == expected
    assert same, f"{name} is {tuple(tensor.shape)}, {tensor.stride()}, not {size}, {stride}"


def _nothing(*args: Any) -> None:
    pass


def _reinterpreted(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} in a wrapper")

    return refuse
