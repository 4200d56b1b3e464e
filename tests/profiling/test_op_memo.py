"""Ops on fakes that are known again return what the fake mode itself would: size, strides, dtype, device, storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxmem.fake import meta_fixups, op_memo
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.profiling.storage_tracker import FakesTracker
from fxmem.torch_private import DisableTorchFunction, storage_key

Look = Callable[[Any, Sequence[Any]], object]


def look(result: Any, args: Sequence[Any]) -> object:
    """What a result is, and on which argument's storage it lies."""
    if not isinstance(result, torch.Tensor):
        return result
    place = storage_key(result)
    return (
        type(result),
        (result.shape, result.stride(), result.storage_offset(), result.untyped_storage().nbytes()),
        (result.dtype, result.device, result.layout, result.requires_grad, result.is_conj(), result.is_neg()),
        [i for i, given in enumerate(op_memo._tensors_in(args)) if storage_key(given) == place],
        str(torch._C._dispatch_key_set(result)),
    )


def looks(output: Any, args: Sequence[Any]) -> list[object]:
    with DisableTorchFunction():
        return [look(one, args) for one in (output if isinstance(output, tuple | list) else (output,))]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compare each result that is known again with that of the mode; the count of results, by kind."""
    counts: Counter[str] = Counter()
    recall = op_memo.run_or_recall

    def crossed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        op, asked = op_memo._asked(func, args, kwargs)
        known = None if asked is None else op_memo._known.get(asked[0])
        output = recall(func, args, kwargs)
        counts["run" if known is None else known.kind] += 1
        if known is not None:
            true = func(*args, **kwargs)
            assert type(output) is type(true)
            if known.kind == op_memo.WRITTEN:
                assert output is true is op_memo._argument(op.written, args, kwargs)
            else:
                assert looks(output, args) == looks(true, args), str(func)
        return output

    monkeypatch.setattr(meta_fixups, "run_or_recall", crossed)
    return counts


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, -1, 4, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + F.dropout(
            self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        )


MODELS = {
    "convolutions": lambda: (
        nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(2)]),
        torch.randn(2, 4, 9, 9),
    ),
    "attention": lambda: (nn.Sequential(Attention(), Attention()), torch.randn(2, 5, 16)),
    "recurrent": lambda: (nn.GRUCell(8, 8), torch.randn(3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_results_known_again_are_those_of_the_mode(name: str, compared: Counter[str]) -> None:
    model, batch = MODELS[name]()
    for _ in range(2):
        world = FakeWorld()
        with world.state_of(model), world.active():
            model(world.fake(batch)).sum().backward()
            optimizer = torch.optim.Adam([world.fake(p) for p in model.parameters()], foreach=False)
            optimizer.step()
    assert all(compared[kind] for kind in (op_memo.NEW, op_memo.VIEW, op_memo.WRITTEN)), compared


def ran_again(run: Callable[[Any], Any], *tensors: torch.Tensor) -> list[Any]:
    """What ``run`` returns of fakes of each of ``tensors``, in a world of their own."""
    found = []
    for tensor in tensors:
        world = FakeWorld()
        with world.active():
            found.append(run(world.fake(tensor)))
    return found


def test_a_number_of_another_type_is_another_call(compared: Counter[str]) -> None:
    whole = torch.ones(3, dtype=torch.int64)
    assert [ran_again(lambda x, n=n: x + n, whole)[0].dtype for n in (1, 1.0, True)] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]


def test_tensors_that_lie_otherwise_are_another_call(compared: Counter[str]) -> None:
    rows = torch.empty(4, 6)
    first, second, third = ran_again(lambda x: x.exp(), rows, rows[:, ::2], rows.t())
    assert [first.stride(), second.stride(), third.stride()] == [(6, 1), (3, 1), (1, 6)]
    cut = ran_again(lambda x: x[1:], rows, torch.empty(8, 6)[:4])
    assert [t.untyped_storage().nbytes() for t in cut] == [96, 192]


def test_a_default_dtype_is_part_of_a_call(compared: Counter[str]) -> None:
    whole = torch.ones(3, dtype=torch.int64)
    before = torch.get_default_dtype()
    found = [ran_again(lambda x: x / 2, whole)[0].dtype]
    try:
        torch.set_default_dtype(torch.float64)
        found += [ran_again(lambda x: x / 2, whole)[0].dtype]
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


def versions() -> list[object]:
    """How often autograd takes tensors, their views and aliases for written."""
    world, seen = FakeWorld(), []
    parameter, x = world.fake(nn.Parameter(torch.randn(4, 4))), world.fake(torch.randn(4, 4))
    with world.active():
        y = parameter * 2 + 1
        for alias in (y.detach(), y.data, y.view(16), x.detach(), x[1:]):
            with torch.no_grad():
                alias.add_(1)
            seen.append((alias._version, y._version, x._version, alias._is_view()))
        z = y.exp()
        z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        with torch.inference_mode():
            seen.append(x.detach().is_inference())
    return seen


def test_views_and_aliases_share_versions_as_they_do_in_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = versions(), versions()
    monkeypatch.setattr(meta_fixups, "run_or_recall", lambda func, args, kwargs: func(*args, **kwargs))
    assert first == again == versions()


def test_a_view_lies_on_the_storage_of_its_own_tensor(compared: Counter[str]) -> None:
    world = FakeWorld()
    first, second = (world.fake(torch.empty(4, 6)) for _ in range(2))
    with world.active():
        views = [tensor.view(24) for tensor in (first, second, first)]
    assert [storage_key(view) for view in views] == [storage_key(t) for t in (first, second, first)]


def made_of_nothing(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((2, 3), (3, 1), dtype=x.dtype)


KNOWN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a view that its schema calls new": (lambda x: torch.ops.aten._unsafe_view(x, [24]), op_memo.VIEW),
    "a list of views": (lambda x: x.split(2), op_memo.VIEW),
    "a result given as out": (lambda x: torch.addcmul(x, x, x, out=torch.empty_like(x)), op_memo.WRITTEN),
    "a tensor made of nothing": (made_of_nothing, op_memo.NEW),
}


@pytest.mark.parametrize("what", KNOWN)
def test_known_again_is(what: str, compared: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_memo, "_known", {})
    run, kind = KNOWN[what]
    ran_again(run, torch.empty(4, 6))
    before = compared[kind]
    ran_again(run, torch.empty(4, 6))
    assert compared[kind] > before


def test_an_out_that_is_resized_is_run_each_time(compared: Counter[str]) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(0)
        torch.mul(x, 2.0, out=out)
        return out

    assert [found.shape for found in ran_again(doubled, *[torch.empty(4, 6)] * 3)] == [(4, 6)] * 3


def test_a_default_dtype_is_part_of_what_is_made_of_nothing(compared: Counter[str]) -> None:
    before = torch.get_default_dtype()
    found = []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found += [ran_again(lambda _: torch.zeros(3), torch.empty(1))[0].dtype]
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


def test_a_tracker_of_fakes_asks_the_fixups_only_for_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    dispatch = meta_fixups.MetaFixups.__torch_dispatch__

    def noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(meta_fixups.MetaFixups, "__torch_dispatch__", noted)
    found = []
    for _ in range(2):
        asked.clear()
        world, tracker = FakeWorld(), FakesTracker()
        x = world.fake(torch.empty(4, 6))
        with world.active(), tracker:
            y = x.exp()
            found.append((y.shape, y.stride(), y.dtype, y.device, tracker.live_bytes))
    assert found[0] == found[1]
    assert found[1][-1] == 4 * 6 * 4
    assert asked == []
