"""What was seen of a step, and what is supposed of the next."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.profiling.optimizer_step import RecordedStep
from fxmem.profiling.profile import profile
from fxmem.profiling.step_trace import trace_step
from fxmem.profiling.training_step import TrainingStep, run_step
from fxmem.profiling.verify import eager_step


def _first_layer_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model[0].parameters())  # type: ignore[index]


def _lists(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True, amsgrad=True)


class WithMore(torch.optim.SGD):
    """Holds a tensor that is not the model's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([*parameters, torch.zeros(3, requires_grad=True)], lr=0.1)


class Forgetful(torch.optim.Optimizer):
    """Makes its state anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            before = self.state[p].get("mean", torch.zeros_like(p))
            self.state[p]["mean"] = before * 0.9 + p.grad * 0.1
            p.sub_(self.state[p]["mean"])


SEEN_OPTIMIZERS = {
    **dict.fromkeys(("adagrad", "adamw", "nadam", "rmsprop", "rprop", "sgd", "adafactor")),
    "first layer only": _first_layer_only,
    "foreach": _lists,
    "forgetful": lambda model: Forgetful(model.parameters()),
    "with more": WithMore,
}


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", SEEN_OPTIMIZERS)
def test_what_was_seen_of_a_step_changes_no_allocation_of_the_next_run_even_where_it_is_wrong(
    name: str, accumulate: bool, scaled: bool
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 8)
    make, scaler = SEEN_OPTIMIZERS[name], torch.amp.GradScaler("cpu") if scaled else None
    optimizer = make if isinstance(make, type) else make(model) if make else name
    inputs, step = Inputs.of((x,), {}), TrainingStep(optimizer=optimizer, accumulate=accumulate, scaler=scaler)
    captured = capture(model, inputs)
    right = profile(captured, inputs, lambda flops, moved: 1.0, step).seen
    assert right is not None
    assert all(right.gradients)
    assert (right.optimizer is None) == (scaled or name in ("forgetful", "with more"))

    def allocations(seen: RecordedStep | None) -> tuple[int, list[tuple[str, int]]]:
        ran = eager_step(model, captured, inputs, step, seen)
        noted = (*ran.events.present, *ran.events.state, *ran.events.step)
        return ran.peak_bytes, [(kind, nbytes) for kind, _, nbytes in noted if nbytes]

    afresh = allocations(None)
    assert allocations(right) == afresh
    assert allocations(RecordedStep(right.gradients)) == afresh
    assert allocations(RecordedStep((None, *right.gradients[1:]), right.optimizer)) == afresh


class Partly(nn.Module):
    """Reaches one of two layers, whose gradient is sparse if asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.used = nn.EmbeddingBag(10, 8, sparse=True, mode="sum") if kind == "sparse" else nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8).requires_grad_(kind == "unused")

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).tanh()


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_steps"), [("usual", "adamw", 1), ("unused", "adamw", 2), ("sparse", "sparseadam", 2)]
)
def test_usual_gradients_are_supposed_and_the_step_observed_again_where_they_are_not_what_is_left(
    kind: str, optimizer: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Partly(kind)
    inputs = Inputs.of((torch.randint(10, (4, 2)) if kind == "sparse" else torch.randn(4, 8),), {})
    captured, step = capture(model, inputs), TrainingStep(optimizer=optimizer)
    observed = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        observed.append(args)
        return trace_step(*args, **kwargs)

    monkeypatch.setattr(fxmem.profiling.profile, "trace_step", counted)
    found = profile(captured, inputs, lambda flops, moved: 1.0, step)
    assert len(observed) == num_steps
    monkeypatch.setattr(fxmem.profiling.profile, "usual_step", lambda step, parameters: None)
    assert profile(captured, inputs, lambda flops, moved: 1.0, step).profile == found.profile


def test_a_constant_of_the_emitted_graph_is_counted_by_whoever_tracks_the_module() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    model, x = Shifted(), torch.randn(4, 8)
    optimized = fxmem.optimize(model, x, optimizer=None, planner="chen")
    assert sum(t.nbytes for t in optimized.fxmem.constants) == 8 * 4
    run_step(lambda: optimized(x))
    model.zero_grad()
    with fxmem.track(optimized, x) as memory:
        run_step(lambda: optimized(x))
    assert memory.peak_bytes == optimized.report.predicted_peak_bytes


def test_hooks_on_all_optimizers_see_no_step_of_planning() -> None:
    seen: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 8)
        assert fxmem.estimate(model, x, optimizer="adamw").floor_bytes
        optimized = fxmem.optimize(model, x, budget="1GB", optimizer=torch.optim.AdamW)
        optimized(x).sum().backward()
    finally:
        hook.remove()
    assert not seen
