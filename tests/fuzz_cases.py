"""Random models, random planners at random budgets, random plans: bitwise eager, peaks as foretold, nothing left alive.

A model is a random program over a growing list of values: each instruction reads values made before it and makes one,
or writes one in place. Shapes stay (rows, WIDTH), so every instruction fits everywhere.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fxmem.ir import FrontierPoint, GraphProfile, Plan
from fxmem.planners.pareto import cheapest_within, pareto
from fxmem.planners.registry import PLANNERS
from fxmem.planners.simulate import drop_all, keep_all, simulate
from tests.exactness import MakePlan, check, passing, random_limits

ROWS, WIDTH = 4, 8

Program = tuple[tuple[str, int, int], ...]


def _attend(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(a[None], b[None], a[None], dropout_p=0.25)[0]


def _halves(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, 1)
    return torch.cat([right.exp().clamp(max=9.0), left * b[:, :4]], 1)


def _count(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    m.count.add_(1)
    m.mean.lerp_(a.detach().mean(0), 0.1)
    return b + m.mean.clone()


def _rows(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    first, *rest = a.unbind(0)
    return torch.stack([*rest, first * b[0]])


def _complex(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a, b)
    return (z * z.conj()).real.tanh() + z.mul(2j).imag


def _no_grad(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        gate = a.sigmoid()
    return gate * b


def _convolved(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    y = m.conv(a.reshape(1, 2, 4, 4)) + b.reshape(1, 2, 4, 4)
    return F.max_pool2d(y, 3, 1, 1).reshape(ROWS, WIDTH)


def _sequence(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    y = m.linear(a.reshape(2, 2, WIDTH)) + b.reshape(2, 2, WIDTH)  # over a view, with a transposed gradient
    return m.mix(y.transpose(1, 2)).transpose(1, 2).reshape(ROWS, WIDTH)


def _normed_image(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    return m.norm2d(a.reshape(2, 2, 2, 4)).relu().reshape(ROWS, WIDTH) + b


def _column(m: "Fuzzed", a: Tensor, b: Tensor) -> Tensor:
    y = a.clone()
    y[:, 1] = b[:, 2] * 2
    y[1, 3:5] = 0.5
    return y


MAKES: dict[str, Any] = {
    "linear": lambda m, a, b: m.linear(a),
    "tied": lambda m, a, b: F.linear(a, m.linear.weight.t(), m.bias),
    "frozen": lambda m, a, b: m.frozen(a),
    "lora": lambda m, a, b: m.frozen(a) + F.dropout(a, 0.2) @ m.down @ m.up,
    "batch_norm": lambda m, a, b: m.norm(a),
    "image_norm": _normed_image,
    "sequence": _sequence,
    "layer_norm": lambda m, a, b: F.layer_norm(a, (WIDTH,), m.bias, None),
    "relu": lambda m, a, b: a.relu(),
    "gelu": lambda m, a, b: F.gelu(a),
    "silu": lambda m, a, b: F.silu(a),
    "relu6": lambda m, a, b: F.relu6(a * 4),
    "tanh": lambda m, a, b: a.tanh(),
    "softmax": lambda m, a, b: a.softmax(-1),
    "square": lambda m, a, b: a.square().clamp(max=4.0),
    "dropout": lambda m, a, b: F.dropout(a, 0.3),
    "noise": lambda m, a, b: a + torch.rand_like(b) * 0.1,
    "bernoulli": lambda m, a, b: a * torch.bernoulli(torch.full((ROWS, 1), 0.5)),
    "multiply": lambda m, a, b: a * b,
    "add": lambda m, a, b: a + b,
    "where": lambda m, a, b: torch.where(a > b, a, b * m.bias),
    "matmul": lambda m, a, b: (a @ b.t() @ a).tanh(),
    "attend": _attend,
    "halves": _halves,
    "rows": _rows,
    "column": _column,
    "complex": _complex,
    "transposed": lambda m, a, b: a.t().reshape(ROWS, WIDTH),
    "expanded": lambda m, a, b: a[:, :1].expand(ROWS, WIDTH) * b,
    "view": lambda m, a, b: a.view(2, -1).view(ROWS, WIDTH),
    "flip": lambda m, a, b: a.flip(0),
    "sorted": lambda m, a, b: a.sort(1)[0],
    "gather": lambda m, a, b: a.gather(1, b.argsort(1)),
    "detached": lambda m, a, b: a.detach() + b,
    "no_grad": _no_grad,
    "conv_pool": _convolved,
    "counters": _count,
    "half": lambda m, a, b: a.bfloat16().sin().float() + b,
}
WRITES: dict[str, Any] = {
    "relu_": lambda m, a, b: a.relu_(),
    "mul_": lambda m, a, b: a.mul_(m.bias),
    "add_": lambda m, a, b: a.add_(b),
    "dropout_": lambda m, a, b: F.dropout(a, 0.4, inplace=True),
    "zero_column_": lambda m, a, b: a[:, 2].zero_(),
    "copy_row_": lambda m, a, b: a[1].copy_(b[0]),
    "view_add_": lambda m, a, b: a.view(-1)[3:9].add_(1),
    "noise_": lambda m, a, b: a.add_(torch.randn_like(b)),
    "clamp_": lambda m, a, b: a.clamp_(-2, 2),
    "relu6_": lambda m, a, b: F.relu6(a, inplace=True),
    "hardtanh_": lambda m, a, b: F.hardtanh(a, -0.75, 0.5, inplace=True),
    "hardtanh_inexact_": lambda m, a, b: F.hardtanh(a, -0.7, 0.3, inplace=True),
}


class Fuzzed(nn.Module):
    """Runs a program; returns its last value and one more. Where values are overwritten, all others too: a saved tensor
    that was overwritten keeps what overwrote it alive, so that dead code would hold more than fxmem can foretell."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm, self.norm2d = nn.BatchNorm1d(WIDTH), nn.BatchNorm2d(2)
        self.conv, self.mix = nn.Conv2d(2, 2, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        values = [x * self.bias]
        for name, i, j in self.program:
            a, b = values[i % len(values)], values[j % len(values)]
            if name in WRITES:
                WRITES[name](self, a, b)
            else:
                values.append(MAKES[name](self, a, b))
        overwrites = any(name in WRITES for name, _, _ in self.program)
        return values[-1], values[len(values) // 2], [v.mean() for v in values if overwrites]


def _eager_trains(program: Program) -> bool:
    """An in-place write may hit a value or view that backward needs; eager refuses those programs, and so may fxmem."""
    torch.manual_seed(0)
    try:
        sum(t.sum() for t in tree_leaves(Fuzzed(program)(torch.randn(ROWS, WIDTH)))).backward()  # type: ignore[union-attr]
    except RuntimeError as error:
        return not any(text in str(error) for text in ("inplace", "in-place", "does not require grad"))
    return True


def planned(planner: str, share: float) -> MakePlan:
    """The plan that ``planner`` makes for a budget ``share`` of the way from its least peak to that of keeping all."""

    def plan(graph_profile: GraphProfile) -> Plan:
        keep = keep_all(graph_profile)
        most_bytes = simulate(graph_profile, keep).peak_bytes
        points = pareto((FrontierPoint(keep, most_bytes, 0.0), *PLANNERS[planner](graph_profile, seconds=1.0)))
        least_bytes = min(point.peak_bytes for point in points)
        budget_bytes = least_bytes + int(share * (most_bytes - least_bytes))
        point = cheapest_within(points, budget_bytes)
        assert point is not None
        assert simulate(graph_profile, point.plan).peak_bytes <= budget_bytes
        return replace(point.plan, planner=f"{planner} at {share:g}")

    return plan


@dataclass(frozen=True)
class Case:
    """One random case; its ``repr`` is what :func:`check_case` takes to run it again."""

    program: Program
    seed: int
    requires_grad: bool
    planner: str
    share: float


def check_case(case: Case) -> bool:
    """Check one case; False if eager itself cannot train the program."""
    if not _eager_trains(case.program):
        return False
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(case.requires_grad)
    forced = (drop_all, passing, random_limits(case.seed))[case.seed % 3]
    plans = (forced, planned(case.planner, case.share))
    check(lambda: Fuzzed(case.program), x, plans=plans, seed=case.seed)
    return True
