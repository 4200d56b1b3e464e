"""Live storage bytes on the CPU and on fake tensors: which are alive, and the most there were.

:class:`StorageTracker` sees every tensor an op returns and counts each *storage* once, from its first sight until it is
freed. What a kernel allocates inside one ATen op is below the dispatcher and not seen; on CUDA it is counted by rules
(:mod:`fxmem.profiling.device_memory`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch

from fxmem.fake.meta_fixups import run_above_fixups
from fxmem.fake.modes import ModeOnFakes
from fxmem.op_facts.kinds import QueryOnly
from fxmem.op_facts.lookup import by_namespace
from fxmem.profiling.caching_allocator import Allocation
from fxmem.profiling.device_memory import EVERYWHERE, DeviceMemory
from fxmem.runtime.host_memory import allocates_host_memory
from fxmem.runtime.unwatched_writes import UnwatchedWrites
from fxmem.torch_patches import graphs_shown_to
from fxmem.torch_private import (
    TorchDispatchMode,
    current_backward_node,
    device_behind,
    leaves_of,
    storage_key,
    told_once,
    tree_leaves,
)

Listener = Callable[[str, int, int], None]
"""Called with ``("alloc" | "free", serial, nbytes)``; a serial names a storage for good, unlike its address."""


class StorageTracker(TorchDispatchMode):
    """Counts live storage bytes, peak included, while it is active.

    Storages that exist before and were not announced by :meth:`hold` weigh nothing. ``live_bytes`` and ``peak_bytes``
    are in bytes; copies in host memory (:mod:`fxmem.runtime.host_memory`) are counted apart, as ``host_bytes`` and
    ``host_peak_bytes``. ``on_op`` is called after each dispatched op with ``(func, args, kwargs, output)``. ``memory``:
    what a storage weighs and what ops take inside on the device of the step. ``on_library`` is called where a thread
    first uses a library that keeps a workspace for it, ``on_workspace`` with the bytes that an op may need of cuDNN beside
    what counts.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        on_op: Callable[[Any, Any, Any, Any], None] | None = None,
        memory: DeviceMemory = EVERYWHERE,
        on_library: Callable[[], None] = lambda: None,
        on_workspace: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._on_library, self._on_workspace = memory, on_library, on_workspace
        self._unwatched = UnwatchedWrites()
        self._stack = ExitStack()
        self.workspaces: dict[tuple[str, str], int] = {}
        """Bytes that a library keeps for a thread, "caller" or "autograd", by both, in the order of their first use."""
        self.thread = ""
        """Which of these runs what is tracked; "": autograd's while a node of the graph runs."""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = self.host_peak_bytes = 0
        self._listener = listener
        self._on_op = on_op
        self._serials: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._next_serial = 0

    def serial(self, tensor: torch.Tensor) -> int:
        """Return the serial of ``tensor``'s storage; a storage never seen before weighs nothing."""
        known = self._serials.get(storage_key(tensor))
        return self._add(tensor, counted=False) if known is None else known

    def known_serial(self, tensor: torch.Tensor) -> int | None:
        """Return the serial of ``tensor``'s storage; None of one never seen before."""
        return self._serials.get(storage_key(tensor))

    def hold(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count the storages of ``tensors`` as alive from now on; return the bytes this added."""
        before = self.live_bytes
        for tensor in tensors:
            for part in parts_of(tensor):
                if storage_key(part) not in self._serials:
                    self._add(part, counted=True)
        return self.live_bytes - before

    def hold_bytes(self, nbytes: Iterable[int]) -> int:
        """Count storages of so many bytes each as alive from now on; return the sum."""
        before = self.live_bytes
        for each in nbytes:
            self._count("alloc", self._new_serial(), each)
        return self.live_bytes - before

    @contextmanager
    def noting(self) -> Iterator[list[Allocation]]:
        """Yield a list of what is allocated and freed in the body."""
        noted: list[Allocation] = []
        before = self._listener

        def both(kind: str, serial: int, nbytes: int) -> None:
            noted.append((kind, serial, nbytes))
            if before is not None:
                before(kind, serial, nbytes)

        self._listener = both
        try:
            yield noted
        finally:
            self._listener = before

    def repeat(self, allocations: Iterable[Allocation]) -> Callable[[], None]:
        """Count allocations noted elsewhere, and the frees of what they made, once more; return what frees the rest."""
        serials: dict[int, tuple[int, int]] = {}
        for kind, serial, nbytes in allocations:
            if kind == "alloc":
                serials[serial] = self._new_serial(), nbytes
                self._count(kind, *serials[serial])
            else:
                self._count(kind, *serials.pop(serial))

        def free() -> None:
            while serials:
                self._count("free", *serials.popitem()[1])

        return free

    def _add(self, tensor: torch.Tensor, *, counted: bool) -> int:
        storage = tensor.untyped_storage()
        host_bytes = storage.nbytes() if counted and allocates_host_memory() else 0
        key, nbytes = storage_key(tensor), self._nbytes_of(tensor) if counted and not host_bytes else 0
        serial = self._new_serial()
        self._serials[key] = serial
        self._refs[key] = weakref.ref(storage, lambda _: self._remove(key, serial, nbytes, host_bytes))
        self._count("alloc", serial, nbytes)
        self.host_bytes += host_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        return serial

    def _move(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """Take the storage of ``output`` for that of ``tensor``, which is not there any more."""
        known, key = storage_key(tensor), storage_key(output)
        if known not in self._serials or key in self._serials:
            return
        serial, _ = self._serials.pop(known), self._refs.pop(known)
        nbytes, storage = self._nbytes_of(output), output.untyped_storage()
        self._serials[key] = serial
        self._refs[key] = weakref.ref(storage, lambda _: self._remove(key, serial, nbytes))

    def _see_made(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count what an op made on CUDA, and what its kernel takes while it runs beside inputs and results."""
        inside = self._memory.inside(func, args, kwargs)
        scratch = inside.scratch
        early = output[:-1] if scratch.late_bytes else output
        with self._beside(scratch.whole):
            with self._beside(scratch.first):
                self._see(self._memory.made_first(func, args, kwargs, output), counted=True)
                for made, nbytes in zip(early, scratch.after, strict=False) if scratch.after else ():
                    self._see(made, counted=True)
                    with self._beside((nbytes,) if nbytes else ()):
                        pass
                self._see(early, counted=True)
                if inside.workspace_bound:
                    self._on_workspace(inside.workspace_bound)
            self._see(output, counted=True)
            with ExitStack() as blocks:
                with self._beside(scratch.between):
                    blocks.enter_context(self._beside(scratch.blocks))
                self._see_libraries(inside.libraries)
                for phase in scratch.phases:
                    with self._beside(phase):
                        pass

    def _see_libraries(self, libraries: Mapping[str, int]) -> None:
        """Count the workspaces of libraries at their first use in a thread. A handle is asked for when arguments are ready:
        copies of matrices come first."""
        thread = self.thread or ("caller" if current_backward_node() is None else "autograd")
        self.keep_workspaces({(thread, library): nbytes for library, nbytes in libraries.items()})

    def keep_workspaces(self, workspaces: Mapping[tuple[str, str], int]) -> None:
        """Count workspaces by thread and library from now on, where they are not there yet."""
        for user, nbytes in workspaces.items():
            if nbytes and user not in self.workspaces:
                self.workspaces[user] = nbytes
                self._on_library()

    @contextmanager
    def _beside(self, blocks: Iterable[int]) -> Iterator[None]:
        """Count blocks of so many bytes as alive in the body."""
        serials = [(self._new_serial(), nbytes) for nbytes in blocks]
        for serial, nbytes in serials:
            self._count("alloc", serial, nbytes)
        yield
        for serial, nbytes in reversed(serials):
            self._count("free", serial, nbytes)

    def _nbytes_of(self, tensor: torch.Tensor) -> int:
        return self._memory.weight(device_behind(tensor).type, tensor.untyped_storage().nbytes())

    def _remove(self, key: int, serial: int, nbytes: int, host_bytes: int = 0) -> None:
        if self._serials.get(key) == serial:
            del self._serials[key], self._refs[key]
        self.host_bytes -= host_bytes
        self._count("free", serial, nbytes)

    def _new_serial(self) -> int:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        return serial

    def _count(self, kind: str, serial: int, nbytes: int) -> None:
        self.live_bytes += nbytes if kind == "alloc" else -nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._listener is not None:
            self._listener(kind, serial, nbytes)

    def __enter__(self) -> StorageTracker:
        self._stack.enter_context(graphs_shown_to(self._unwatched.show))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ran(func, args, kwargs or {})

    def _ran(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _is_query(func):
            return run_above_fixups(func, args, kwargs)
        written_over = self._unwatched.includes(func, args)
        self._see((args, kwargs), counted=False)
        output = run_above_fixups(func, args, kwargs)
        self._unwatched.ran(func, output)
        if written_over and output.nbytes == args[0].nbytes:
            self._move(args[0], output)
        if self._memory.model is None:
            self._see(output, counted=True)
        else:
            self._see_made(func, args, kwargs, output)
        if self._on_op is not None:
            self._on_op(func, args, kwargs, output)
        return output

    def _see(self, tree: Any, *, counted: bool) -> None:
        for leaf in leaves_of(tree):
            for part in parts_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                if storage_key(part) not in self._serials:
                    self._add(part, counted=counted)


class FakesTracker(ModeOnFakes, StorageTracker):
    """A tracker of steps on fakes, where each op takes it less time: torch wraps the method of each class as it is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ran(func, args, kwargs or {})


_indices, _values = torch.ops.aten._indices.default, torch.ops.aten._values.default
"""Of any sparse tensor; the methods without an underscore want a coalesced one."""
_QUERIES = by_namespace(QueryOnly)


@told_once
def _is_query(func: Any) -> bool:
    return func.namespace in _QUERIES


def has_storage(leaf: object) -> TypeGuard[torch.Tensor]:
    """True for tensors that lie on one storage: dense ones; see :func:`parts_of` for sparse ones."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


def parts_of(leaf: object) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the bytes of ``leaf``: itself, or a sparse tensor's indices and values."""
    if has_storage(leaf):
        return (leaf,)
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.sparse_coo:
        return (_indices(leaf), _values(leaf))
    if isinstance(leaf, torch.Tensor) and leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (leaf.crow_indices(), leaf.col_indices(), leaf.values())
    if isinstance(leaf, torch.Tensor) and leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (leaf.ccol_indices(), leaf.row_indices(), leaf.values())
    return ()


def tensors_of(holder: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``holder`` (a tensor, module, optimizer, GradScaler or a nest of them) refers to, with
    gradients; of an optimized module, the constants of its emitted graph too."""
    if isinstance(holder, torch.Tensor):
        yield holder
        if holder.is_leaf and holder.grad is not None:
            yield holder.grad
    elif isinstance(holder, torch.nn.Module):
        for tensor in (*holder.parameters(), *holder.buffers()):
            yield from tensors_of(tensor)
        yield from getattr(getattr(holder, "fxmem", None), "constants", ())
    elif isinstance(holder, torch.optim.Optimizer):
        for state in holder.state.values():
            yield from tensors_of(tuple(state.values()))
        for group in holder.param_groups:
            yield from tensors_of(tuple(group.values()))
    elif isinstance(holder, torch.amp.GradScaler):
        yield from (value for value in vars(holder).values() if isinstance(value, torch.Tensor))
    else:
        for leaf in tree_leaves(holder):
            if leaf is not holder:
                yield from tensors_of(leaf)
