"""DistributedDataParallel and FSDP2 on several processes: peaks of each rank beside what is predicted.

``torchrun --nproc-per-node 2 -m benchmarks.framework_loops.ranks`` prints a line of JSON for each case, by rank 0. Peaks
are of the CPU's storages, from before the wrapper is made, in the fourth step. Predicted is, for DDP, the plan's peak and
what DDP holds beside it; for FSDP2 the peak of one rank alone, in a process group whose other ranks are not there
(:func:`alone`), which needs no second process.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxmem
from fxmem.profiling.storage_tracker import StorageTracker, tensors_of

WIDTH, BATCH, NUM_STEPS = 32, 64, 4
MARK = "ROW "


@dataclass(frozen=True, slots=True)
class RankRow:
    """One way of wrapping. Bytes by rank."""

    case: str
    eager_bytes: list[int]
    peak_bytes: list[int]
    predicted_bytes: list[int]
    same_bits: bool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)).train()


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def trained(model: nn.Module, wrap: Callable[[nn.Module], nn.Module], micro_batches: int) -> tuple[int, list[Tensor]]:
    """Return the peak of the last step in bytes, and the parameters after it."""
    tracker = StorageTracker()
    tracker.hold(tensors_of(model))
    torch.manual_seed(dist.get_rank())
    with tracker:
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                tracker.peak_bytes = tracker.live_bytes
            for k in range(micro_batches):
                last = k == micro_batches - 1
                with synchronized(wrapped, last):
                    x = batch(10 * step + k)
                    output = wrapped(x)
                    loss = output.sum()
                    loss.backward()
                    if not last:
                        del x, output, loss
            optimizer.step()
            optimizer.zero_grad()
            del x, output, loss
        peak = tracker.peak_bytes
    return peak, [local(p).detach().clone() for p in wrapped.parameters()]


@contextmanager
def synchronized(wrapped: nn.Module, yes: bool) -> Iterator[None]:
    """Let ranks exchange gradients in the backward, or not yet."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(yes)
        yield
    elif yes:
        yield
    else:
        with wrapped.no_sync():  # type: ignore[operator]
            yield


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def least(model: nn.Module, **options: Any) -> Any:
    """Return ``model`` planned for about the least peak."""
    options |= {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), "planner": "chen", "cost": "cpu"}
    floor = fxmem.estimate(model, batch(0), **options).floor_bytes
    return fxmem.optimize(model, batch(0), budget=floor, **options)


def least_blocks(model: nn.Sequential, **options: Any) -> nn.Module:
    """Return ``model`` with each of its blocks planned for about the least peak."""
    for k, block in enumerate(model):
        if isinstance(block, Block):
            x = batch(0).requires_grad_(k > 0)
            bare = {**options, "optimizer": None, "planner": "chen", "cost": "cpu"}
            floor = fxmem.estimate(block, x, **bare).floor_bytes
            model[k] = fxmem.optimize(block, budget=floor, **bare)
    return model


def shard_each(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


@dataclass(frozen=True, slots=True)
class Case:
    wrap: Callable[[nn.Module], nn.Module]
    has_buckets: bool = True
    """Whether DDP's buckets are there beside gradients; not so where gradients are views of them."""
    accumulate: bool = False
    """Whether memory for gradients is there from the start of the step."""
    micro_batches: int = 1
    optimize: Callable[..., nn.Module] = least


CASES = {
    "DDP": Case(ddp),
    "DDP, buckets of 8 kB": Case(partial(ddp, bucket_cap_mb=0.008)),
    "DDP, gradient_as_bucket_view": Case(partial(ddp, gradient_as_bucket_view=True), False, accumulate=True),
    "DDP, no_sync": Case(ddp, accumulate=True, micro_batches=2),
    "FSDP2, block by block": Case(shard_each, optimize=least_blocks),
    "FSDP2, reshard_after_forward=False": Case(partial(shard_each, reshard_after_forward=False), optimize=least_blocks),
    "FSDP2, no gradient sync": Case(shard_each, accumulate=True, micro_batches=2, optimize=least_blocks),
}


def predicted_bytes(name: str, model: nn.Module) -> int:
    """Return the plan's peak and what DDP holds beside it: buckets, which are as large as all gradients. A model planned
    block by block has no plan of its own."""
    if not isinstance(model, fxmem.FxMemModule):
        place = ["--alone", name, "--rank", str(dist.get_rank()), "--ranks", str(dist.get_world_size())]
        return int(subprocess.check_output([sys.executable, "-m", __spec__.name, *place], text=True))
    case = CASES[name]
    gradients_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return model.fxmem.report.predicted_peak_bytes + case.has_buckets * gradients_bytes


def alone(name: str, rank: int, num_ranks: int) -> int:
    """Return the peak of one rank in bytes, by itself: the other ranks' parts of what is gathered stay unwritten."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    case = CASES[name]
    return trained(case.optimize(build(), accumulate=case.accumulate), case.wrap, case.micro_batches)[0]


def row_of(name: str) -> RankRow:
    case = CASES[name]
    eager_bytes, expected = trained(build(), case.wrap, case.micro_batches)
    model = case.optimize(build(), accumulate=case.accumulate)
    predicted = predicted_bytes(name, model)
    peak_bytes, found = trained(model, case.wrap, case.micro_batches)
    ours = (eager_bytes, peak_bytes, predicted, all(map(torch.equal, expected, found)))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, ours)
    eager, peak, predictions, same = zip(*ranks, strict=True)
    return RankRow(name, list(eager), list(peak), list(predictions), all(same))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", metavar="CASE", help="print the peak of one rank of this case, without the others")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # it runs at other moments each time, and with it FSDP2's peaks differ by a block or two that is gathered
    if given.alone:
        print(alone(given.alone, given.rank, given.ranks))
        return
    dist.init_process_group("gloo")
    for name in CASES:
        row = row_of(name)
        if dist.get_rank() == 0:
            print(MARK + json.dumps(asdict(row)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
