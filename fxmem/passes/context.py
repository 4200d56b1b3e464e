"""What the steps of one compilation share: the model, one call of it, and what the user asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from fxmem.capture.dynamic_batch import without_values
from fxmem.capture.graph import CaptureGraph, Inputs, device_of
from fxmem.capture.joint_steps import joint_steps
from fxmem.ir import FrontierPoint
from fxmem.passes.choices import DEFAULT
from fxmem.passes.fused_kernels import Kernels
from fxmem.planners.policy import Rule
from fxmem.profiling.allocator_state import AllocatorState
from fxmem.profiling.device_memory import DeviceMemory
from fxmem.profiling.optimizer_step import allocator_before
from fxmem.profiling.profile import Profiled, profile
from fxmem.profiling.roofline import Hardware, hardware_for
from fxmem.profiling.training_step import TrainingStep
from fxmem.progress import check_interrupted
from fxmem.runtime.autocast import Autocast, autocast_as_in_forward, casts_kept
from fxmem.runtime.programs.joint import JointSteps, Judge
from fxmem.torch_patches import as_in_training


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for, checked (:mod:`fxmem.api.arguments` makes it)."""

    budget_bytes: int | None
    """None: as little recomputation as possible, no bound."""
    step: TrainingStep
    planner: str
    """A key of :data:`fxmem.planners.registry.PLANNERS`."""
    plan_seconds: float
    """CPU time of the planner's thread."""
    hardware: Hardware | None
    """None: the preset of the model's device."""
    measure: bool = False
    """Whether op times are measured on the model's device."""
    policy: tuple[Rule, ...] = ()
    cache: bool = True
    """Whether frontiers and measured op times are kept on disk."""
    inplace: bool = True
    """Whether ops that may write over their input do."""
    compress_saved: bool = True
    """Whether less is saved, and held by backwards, where memory is short, with the same bits."""
    budget_of: str = "allocated"
    """On CUDA, what the budget bounds: "allocated" bytes or "reserved" ones."""
    budget_share: float | None = None
    """The budget as a share of eager's peak, which sets ``budget_bytes`` for each kind of call."""
    allow: frozenset[str] = frozenset(DEFAULT)
    """Keys of :data:`fxmem.passes.choices.CHOICES`."""
    background: bool = False
    """Whether plans are searched for beside the training, whose first steps run under a quick one."""
    runtime: str = "auto"
    """One of :data:`fxmem.capture.joint_steps.RUNTIMES`."""
    beside_bytes: int = 0
    """What the budget is to hold beside a planned peak, as far as the step as it is tells: CUDA's allocator adds to it, and
    programs need some slack."""

    @property
    def plan_bytes(self) -> int | None:
        """What a planned peak is to keep, of the budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.beside_bytes

    def seen_with(self, leaves: Sequence[Any]) -> Settings:
        """Return the settings with targets that are an example for these inputs, if it is not known yet for which."""
        targets = self.step.targets.seen_with(leaves)
        return self if targets is self.step.targets else replace(self, step=replace(self.step, targets=targets))

    def __setstate__(self, state: list[Any]) -> None:
        """Pickles of earlier versions lack the last fields."""
        defaults = [None if f.default is MISSING else f.default for f in fields(self)]
        for name, value in zip(self.__slots__, [*state, *defaults[len(state) :]], strict=True):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class CompileContext:
    """One compilation. A graph is profiled once; a profile spares work of the next one."""

    model: torch.nn.Module
    inputs: Inputs
    settings: Settings
    autocast: Autocast | None = None
    """The region that the call is in."""
    base: Profiled | None = None
    """A profile of another size of the same model."""
    _profiles: dict[int, Profiled] = field(default_factory=dict, repr=False)
    quick_points: dict[int, tuple[FrontierPoint, ...]] = field(default_factory=dict, repr=False)
    """What a planner found quickly, by the id of a profiled graph of this context."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self.settings.seen_with(self.inputs.leaves))

    @property
    def hardware(self) -> Hardware:
        """The hardware asked for, else the preset of the model's device."""
        if self.settings.hardware is not None:
            return self.settings.hardware
        device = device_of(self.model)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
        return hardware_for(device.type, name)

    @property
    def step(self) -> TrainingStep:
        """The step asked for, with targets for this call."""
        return self.settings.step.for_inputs(self.inputs.leaves)

    def profile_of(self, graph: CaptureGraph) -> Profiled:
        """Return the profile of ``graph``, with estimated times. Errors: ``ProfileError``."""
        profiled = self._profiles.get(id(graph))
        if profiled is None:
            check_interrupted()
            latest = next(reversed(self._profiles.values()), self.base)
            profiled = profile(graph, self.inputs, self.hardware.seconds, self.step, latest)
            self._profiles[id(graph)] = profiled  # which holds the graph, so its id stays its own
        return profiled

    def renamed(self, graph: CaptureGraph, other: CaptureGraph) -> CaptureGraph:
        """Return ``other``, which has the nodes of ``graph`` and hence its profile."""
        self._profiles[id(other)] = replace(self.profile_of(graph), captured=other)
        return other

    def allocator_state(self) -> AllocatorState | None:
        """Return what CUDA's allocator holds now; None where the step does not run on a CUDA device that is here."""
        parameters = tuple(self.model.parameters())
        return allocator_before(
            self.settings.step, (*parameters, *self.model.buffers(), *self.inputs.tensors), parameters
        )

    def with_settings(self, **changes: Any) -> CompileContext:
        """Return the context under other settings; profiles are shared."""
        return replace(self, settings=replace(self.settings, **changes))

    def joint_steps(
        self,
        captured: CaptureGraph,
        graph_module: fx.GraphModule,
        room_bytes: int | None,
        judge: Judge | None,
        num_watched: int = 1,
    ) -> JointSteps | None:
        """Return what runs steps of ``graph_module``, emitted from ``captured``, as programs; None if they run on the tape.
        ``room_bytes``: what a planned step leaves of its budget. ``judge``: says whether a program keeps the budget.
        ``num_watched``: calls before one is written down."""
        inside = DeviceMemory.of(p.device for p in captured.parameters).most_inside
        asked_for = self.settings.runtime, self.settings.budget_of
        clears_gradients = self.step.loop.zero_grad_before_backward
        return joint_steps(
            captured,
            graph_module,
            self.inputs,
            room_bytes,
            num_watched,
            asked_for,
            inside,
            judge,
            clears_gradients,
            Kernels() if "fuse" in self.settings.allow else None,
        )

    def scope_around(self, captured: CaptureGraph) -> CallScope:
        """Return what is on now, for the devices that a call of ``captured`` works on."""
        return CallScope.around(tuple(dict.fromkeys(t.device for t in (*captured.parameters, *self.inputs.tensors))))

    def without_values(self) -> CompileContext:
        """Return the context without the batch: shapes are all that a captured graph is profiled by."""
        return replace(self, inputs=without_values(self.inputs))


@dataclass(frozen=True, slots=True)
class CallScope:
    """What a call was made under, to plan for it later."""

    regions: tuple[Autocast, ...]
    """Autocast regions around the call."""
    casts: bool
    """Whether their casts are kept."""
    devices: tuple[torch.device, ...]

    @staticmethod
    def around(devices: tuple[torch.device, ...]) -> CallScope:
        """Return what is on now."""
        regions = tuple(region for kind in {d.type for d in devices} if (region := Autocast.of(kind)))
        return CallScope(regions, torch.is_autocast_cache_enabled(), devices)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for scope in (autocast_as_in_forward(None, self.devices), casts_kept(self.casts)):
                stack.enter_context(scope)
            for region in self.regions:
                stack.enter_context(region.enter())
            stack.enter_context(as_in_training())
            yield
