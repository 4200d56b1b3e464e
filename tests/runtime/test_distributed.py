"""Data parallelism around an optimized model: one and two processes (gloo), gradients bitwise those around eager."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.api.module import OptimizedModule
from tests.exactness import same_bits

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

WIDTH = 16
QUICK: dict[str, Any] = {"optimizer": None, "planner": "chen", "inplace": False, "loss_fn": torch.sum}
"""A loss that is told of is not looked for."""


class Block(nn.Module):
    """Residual; with a BatchNorm, whose statistics DistributedDataParallel hands around, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block())


def batch(seed: int) -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))


def least(model: nn.Module) -> OptimizedModule:
    """Return ``model`` optimized to the least budget that fits a batch that requires grad."""
    x = batch(0).requires_grad_()
    with pytest.raises(fxmem.InfeasibleBudgetError) as info:
        fxmem.optimize(model, x, budget="1B", **QUICK)
    return fxmem.optimize(model, budget=info.value.least_bytes, **QUICK)


def optimized_blocks() -> nn.Sequential:
    model = build()
    model[1], model[2] = least(model[1]), least(model[2])
    return model


def shard_each(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in list(model.children())[1:]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def trained(model: nn.Module, micro_batches: int = 1) -> Iterator[Tensor | None]:
    """Train for two steps; yield what they leave: gradients of every step, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    for step in range(2):
        for i in range(micro_batches - 1):
            with model.no_sync():
                model(batch(100 * step + 10 * i + rank)).square().mean().backward()
        model(batch(100 * step + 50 + rank)).square().mean().backward()
        yield from (p.grad.clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    yield from (t.detach() for t in (*model.parameters(), *model.buffers()))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def assert_trains_alike(eager: nn.Module, optimized: nn.Module, micro_batches: int = 1) -> None:
    planned = [m for m in optimized.modules() if isinstance(m, OptimizedModule)]
    expected, found = list(trained(eager, micro_batches)), list(trained(optimized, micro_batches))
    for a, b in zip(expected, found, strict=True):
        assert same_bits(local(a), local(b))
    assert planned
    assert all(module.plan.dropped for module in planned), "a plan that drops nothing proves nothing"


def check_both_kinds(*options: dict[str, Any]) -> None:
    """Assert what holds in any number of processes, for ``DistributedDataParallel`` with each of ``options``."""
    for micro_batches, option in enumerate(options, start=1):
        wrapped = [DistributedDataParallel(model, **option) for model in (build(), least(build()))]
        assert_trains_alike(*wrapped, micro_batches)
    assert_trains_alike(shard_each(build()), shard_each(optimized_blocks()))


def in_one_of_two_processes(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    check_both_kinds({"bucket_cap_mb": 0.001})
    distributed.destroy_process_group()


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_one_process() -> None:
    check_both_kinds({"gradient_as_bucket_view": True}, {}, {"find_unused_parameters": True})


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_optimized_parts_of_a_model() -> None:
    assert_trains_alike(DistributedDataParallel(build()), DistributedDataParallel(optimized_blocks()))


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(in_one_of_two_processes, (f"{tmp_path}/store",), nprocs=2)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_a_whole_model_optimized_then_sharded() -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert_trains_alike(*(fully_shard(model, mesh=mesh) for model in (build(), least(build()))))


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_is_refused_with_the_right_order() -> None:
    with pytest.raises(fxmem.InputError, match=r"DTensor.*fully_shard\(fxmem\.optimize\(module"):
        fxmem.optimize(shard_each(build()))


@pytest.mark.usefixtures("process_group")
def test_parts_sharded_after_the_whole_was_optimized_are_refused_when_it_runs() -> None:
    model = shard_each(fxmem.optimize(build(), optimizer=None))
    with pytest.raises(fxmem.InputError, match=r"1\.norm\.weight is a DTensor.*one by one"):
        model(batch(0))
