"""Models that look at the values of their inputs: each way they take is captured, and taken when eager takes it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from tests import zoo
from tests.exactness import check, differences, run

WIDTH = 8


class Masked(nn.Module):
    """Skips a mask that is all ones, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x).exp()
        if (mask == 1).all():
            return y.sin()
        return (y * mask[:, None]).tanh()


def masks(rows: int) -> tuple[Tensor, Tensor]:
    ragged = torch.ones(rows, dtype=torch.long)
    ragged[-1] = 0
    return torch.ones(rows, dtype=torch.long), ragged


@pytest.mark.parametrize("mask", masks(4), ids=["ones", "ragged"])
def test_each_way_is_eagers(mask: Tensor) -> None:
    checked = check(Masked, torch.randn(4, WIDTH), mask)
    assert [read.seen for read in checked.captured.reads] == [mask.all().item()]


@pytest.mark.slow
def test_an_optimized_model_goes_the_way_its_inputs_say() -> None:
    torch.manual_seed(0)
    eager = Masked()
    optimized = fxmem.optimize(Masked(), planner="chen")
    optimized.load_state_dict(eager.state_dict())
    for rows in (4, 6, 9):
        x = torch.randn(rows, WIDTH)
        for mask in masks(rows) * 2:
            inputs = Inputs.of((x, mask), {})
            assert not differences(run(eager, eager, inputs), run(optimized, optimized, inputs))
    assert sorted(optimized.fxmem.plans.specializations) == [2, 2, 2]


@pytest.mark.slow
def test_other_sizes_of_one_way_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = fxmem.optimize(Masked(), planner="chen")
    captures = []
    for place in ("fxmem.api.size_families.capture", "fxmem.capture.advice.capture"):
        monkeypatch.setattr(place, lambda *args, **options: captures.append(1) or capture(*args, **options))
    for rows in (4, 6, 9, 12):
        optimized(torch.randn(rows, WIDTH), masks(rows)[0]).sum().backward()
    assert len(captures) == 2  # one for the first size, one that serves all


@pytest.mark.slow
def test_a_model_that_goes_many_ways_is_warned_of() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, start: Tensor) -> Tensor:
            return self.linear(x[int(start) :]).exp()

    optimized = fxmem.optimize(Shifted(), planner="chen")
    x = torch.randn(12, WIDTH)

    def agrees(start: int) -> bool:
        return torch.equal(optimized(x, torch.tensor(start)), optimized.original(x, torch.tensor(start)))

    assert all(agrees(start) for start in range(7))
    with pytest.warns(UserWarning, match=r"Shifted looks at values .* took 8 different ways") as warned:
        assert agrees(7)
    assert warned[0].filename == __file__  # where the model is called


@pytest.mark.slow
def test_a_value_written_over_is_not_known() -> None:
    class Overwritten(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mine = mask.clone()
            view = mine[:2]
            view.copy_(x[:2, 0] > 0)  # a value that follows from floats
            return super().forward(x, mine)

    with pytest.raises(fxmem.CaptureError, match="depends on the values in tensors"):
        fxmem.optimize(Overwritten(), (torch.randn(4, WIDTH), masks(4)[0]))


def shifted(mask: Tensor) -> Tensor:
    """Shift right, as models of sequences to sequences do with labels."""
    found = mask.new_zeros(mask.shape)
    found[1:] = mask[:-1].clone()
    found[0] = 1
    return found.masked_fill_(found == -100, 1)


def squared(mask: Tensor) -> Tensor:
    mine = mask.clone()
    mine *= mine.view(-1)  # an alias of what is written to
    return mine


def twice_inverted(mask: Tensor) -> Tensor:
    return (~(~mask.bool())).long()


@pytest.mark.slow
@pytest.mark.parametrize("changed", [shifted, squared, twice_inverted])
def test_values_written_in_place_are_followed(changed: Callable[[Tensor], Tensor]) -> None:
    class Changed(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, changed(mask))

    eager, ragged = Changed(), masks(4)[1]
    optimized = fxmem.optimize(copy.deepcopy(eager), planner="chen")
    for mask in (*masks(4), ragged.flip(0), torch.tensor([1, 0, 1, 1])):
        inputs = Inputs.of((torch.randn(4, WIDTH), mask), {})
        assert not differences(run(eager, eager, inputs), run(optimized, optimized, inputs))


def test_a_random_mask_is_not_known() -> None:
    class Random(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, torch.randint_like(mask, 0, 2))

    with pytest.raises(fxmem.CaptureError, match="depends on the values in tensors"):
        fxmem.optimize(Random(), (torch.randn(4, WIDTH), masks(4)[0]))


@pytest.mark.slow
def test_without_values_the_models_own_general_way_is_captured() -> None:
    entry = zoo.get("t5")
    model, (args, kwargs) = entry.build().train(), entry.batch(entry.default_batch)
    assert capture(model, Inputs.of(args, kwargs)).reads
    ghosts: dict[str, Any] = {name: torch.empty_like(t, device="meta") for name, t in kwargs.items()}
    seen = fxmem.estimate(model, args, kwargs, optimizer=None, loss_fn=entry.loss, planner="chen")
    unseen = fxmem.estimate(model, args, ghosts, optimizer=None, loss_fn=entry.loss, planner="chen")
    assert seen.peak_bytes < unseen.peak_bytes  # the mask is there


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2_2l", "mixtral"])
def test_causal_language_models_keep_the_kernel_they_have_in_eager(name: str) -> None:
    entry = zoo.get(name)
    captured = capture(entry.build().train(), Inputs.of(*entry.batch(entry.default_batch)))
    calls = [n for n in captured.graph_module.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    masks = [n.args[3] if len(n.args) > 3 else n.kwargs.get("attn_mask") for n in calls]
    assert len(masks) > 0
    assert set(masks) == {None}


@pytest.mark.parametrize("asked", ["is_compiling", "is_exporting"])
def test_a_model_that_asks_whether_it_is_compiled_takes_its_eager_branch(asked: str) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return hidden.relu() if getattr(torch.compiler, asked)() else hidden.tanh()

    captured = check(Asking, torch.randn(4, 8)).captured
    assert "tanh" in captured.graph_module.code
    assert not torch.compiler.is_compiling()


def test_experts_run_in_the_grouped_matmul_that_they_run_in_eagerly() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 16, 32))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs=ends).tanh()

    captured = check(Experts, torch.randn(10, 16), torch.tensor([2, 7, 10], dtype=torch.int32)).captured
    assert "grouped_mm" in captured.graph_module.code
