"""The table of what is known of ops beyond what is observed: its rows are right, reasoned, shown by a test, and alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.capture.value_guards import KnownValues
from fxmem.fake.fake_tensors import FakeWorld, ScalarReads
from fxmem.op_facts import FACTS, names_of
from fxmem.op_facts.kinds import MakesConstant, NeverRecompute, OpFact, UpdatesOnly, WritesUnsaid
from fxmem.op_facts.lookup import by_op, own_op, resolved
from fxmem.profiling.op_effects import written_by
from fxmem.profiling.profile import profile
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.storage_tracker import StorageTracker

aten = torch.ops.aten
TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "fxmem"


# -- the table ---------------------------------------------------------------------------------------------------------


def names_of_tests() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_says_why_and_names_a_test_that_exists() -> None:
    known = names_of_tests()
    assert [fact.test for fact in FACTS if fact.test not in known] == []
    assert [fact.ops for fact in FACTS if len(fact.why.split()) < 5] == []


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{type(fact.value).__name__}-{fact.ops[0]}")
def test_every_row_names_ops_that_there_are(fact: OpFact) -> None:
    for name in fact.ops:
        if name.startswith("fxmem."):
            assert any(re.search(rf"def {name[6:]}\(", path.read_text()) for path in PACKAGE.rglob("*.py")), name
        elif not name.endswith(".*"):
            assert callable(resolved(name)), name


def test_two_rows_that_say_the_same_kind_of_thing_of_an_op_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind:
        pass

    rows = tuple(OpFact(("aten.relu.default",), Kind(), "", "") for _ in range(2))
    monkeypatch.setattr("fxmem.op_facts.lookup.FACTS", rows)
    with pytest.raises(ValueError, match=r"two rows .* aten\.relu\.default"):
        by_op(Kind)


def test_a_function_that_no_row_names_is_no_op_of_fxmems() -> None:
    def unheard_of() -> None:
        pass

    with pytest.raises(KeyError, match=r"no row .* fxmem\.unheard_of"):
        own_op(unheard_of)


CALLED_BY_ANOTHER_NAME = {
    ("profiling/storage_tracker.py", "torch.ops.aten._indices.default"),  # the parts of a sparse tensor are asked for
    ("profiling/storage_tracker.py", "torch.ops.aten._values.default"),
    ("runtime/unwatched_writes.py", "torch.ops.aten.add.Tensor"),  # how autograd's engine adds gradients
    ("passes/chunk.py", "aten.reshape.default"),  # written into the graph
    ("passes/chunk.py", "aten.slice.Tensor"),
    ("compiled/emit.py", "torch.ops.prims.convert_element_type.default"),  # written into the graph
    ("compiled/emit.py", "torch.ops.aten.ne.Scalar"),
    ("compiled/emit.py", "torch.ops.aten.as_strided.default"),
    ("runtime/programs/recording.py", "aten.as_strided.default"),  # written into the program
    ("fake/meta_fixups.py", "torch.ops.prim.device.default"),  # how a fake is asked for its device
}
"""Ops that are named in one place and called in another, not decided about."""
OP = re.compile(r"(torch\.ops\.\w+|_?(aten|prims?))\.\w+(\.\w+)?")


def ops_decided_by(source: str) -> list[tuple[int, str]]:
    """Return (line, op) for each op that ``source`` names and does not call on the spot, docstrings aside."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    skipped |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:  # parents come before their children: of ``aten.relu.default`` only the whole counts
        if isinstance(node, ast.Attribute) and (id(node) in skipped or OP.fullmatch(ast.unparse(node))):
            skipped.add(id(node.value))
    named = ((n, ast.unparse(n) if isinstance(n, ast.Attribute) else n.value) for n in nodes if is_text(n))
    return [(n.lineno, text) for n, text in named if id(n) not in skipped and OP.fullmatch(text)]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.slow
def test_no_other_place_decides_by_the_name_of_an_op() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "op_facts"]
    assert len(paths) > 50
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {op}"
        for path in paths
        for line, op in ops_decided_by(path.read_text(encoding="utf-8"))
        if (path.relative_to(PACKAGE).as_posix(), op) not in CALLED_BY_ANOTHER_NAME
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "if op is aten.relu.default: pass",
        "SLOW = (torch.ops.aten.lstm, 1)",
        "lean = op in {aten.conv2d.padding}",
        "if name == 'aten.copy_.default': pass",
        "work(aten.bmm.default, x)",
        "fused = {_aten.bmm}",
        "fused = {prims.iota}",
    ],
)
def test_a_decision_by_the_name_of_an_op_is_found(line: str) -> None:
    ((number, _),) = ops_decided_by(f"aten = torch.ops.aten\n{line}")
    assert number == 2


@pytest.mark.parametrize(
    "line", ["aten = torch.ops.aten", "y = aten.add.Tensor(x, 1)", "y = torch.ops.aten._values(x)"]
)
def test_calling_an_op_is_no_decision(line: str) -> None:
    assert ops_decided_by(line) == []


# -- what ops write and read -------------------------------------------------------------------------------------------


def test_schemas_do_not_say_what_is_written() -> None:
    for op, fact in by_op(WritesUnsaid).items():
        said = {place for place, argument in enumerate(op._schema.arguments) if argument.is_write}
        assert not said & set(fact.places), op
        names = [op._schema.arguments[place].name for place in fact.places]
        assert names == ["running_mean", "running_var"], op


@pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten.batch_norm_update_stats.default])
def test_running_statistics_are_written_though_nothing_says_so(op: Callable[..., object]) -> None:
    x, mean, var = torch.randn(8, 3), torch.zeros(3), torch.ones(3)
    args = (x, None, None, mean, var, True, 0.1, 1e-5) if op is aten.native_batch_norm.default else (x, mean, var, 0.1)
    versions = mean._version, var._version
    op(*args)
    assert mean.abs().sum() > 0
    assert (mean._version, var._version) == versions  # so nothing but the table tells
    assert {id(t) for t in written_by(op, args, {})} == {id(mean), id(var)}


def test_collectives_are_never_recomputed() -> None:
    assert {"c10d.*", "_c10d_functional.*"} <= names_of(NeverRecompute)

    class Gathers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops._c10d_functional.all_reduce(self.layer(x), "sum", "0") * 2

    model, inputs = Gathers().train(), Inputs.of((torch.randn(2, 4),), {})
    nodes = profile(capture(model, inputs), inputs, PRESETS["cpu"].seconds).profile.nodes
    reasons = {node.op: node.why_not for node in nodes}
    assert "runs a collective" in next(why for op, why in reasons.items() if "all_reduce" in op)
    assert reasons["aten.linear.default"] == ""


def test_constants_are_known_and_random_numbers_are_not() -> None:
    values = KnownValues([])
    with values:
        constants = [torch.arange(3), torch.full((2,), 7), torch.ones(2), torch.tensor([1, 2]), torch.zeros(1)]
        drawn = torch.rand(2)
    assert len(constants) == len(names_of(MakesConstant))
    assert all(map(values.knows, constants))
    assert not values.knows(drawn)


def test_scalars_of_fakes_read_as_one() -> None:
    world = FakeWorld()
    with world.active():
        counter, share = torch.zeros((), dtype=torch.int64), torch.zeros(())
        assert aten._local_scalar_dense.default(counter) == 1
        with ScalarReads():
            assert counter.item() == 1
            assert share.item() == 0.5  # by which an optimizer may divide one less it
            assert float(counter) == 0.5


def test_a_query_is_no_op_of_the_step() -> None:
    seen: list[str] = []
    world = FakeWorld()
    with world.active():
        x = torch.zeros(4)
        with StorageTracker(on_op=lambda func, *_: seen.append(func.namespace)) as tracker:
            assert x.device.type == "cpu"
            torch.ops.prim.device.default(x)
            x + 1
    assert "prim" not in seen
    assert seen.count("aten") >= 1
    assert tracker.peak_bytes == 16


def test_an_update_is_none_of_what_the_op_makes() -> None:
    x, weight = torch.randn(8, 3), torch.ones(3)
    for op, fact in by_op(UpdatesOnly).items():
        if op is not aten.batch_norm.default:
            continue
        statistics = [torch.zeros(3), torch.ones(3)]
        with_them = op(x, weight, None, *statistics, True, 0.1, 1e-5, False)
        without = op(x, weight, None, None, None, True, 0.1, 1e-5, False)
        assert fact.places == (3, 4)
        assert torch.equal(with_them, without)
        assert statistics[0].abs().sum() > 0


# -- what fakes get wrong ----------------------------------------------------------------------------------------------


def losses(x: Tensor, ones: Tensor) -> list[Tensor]:
    ones = ones.to(x.dtype)
    likely = F.binary_cross_entropy(x.sigmoid(), ones)
    return [likely, F.soft_margin_loss(x, ones), F.mse_loss(x, ones), F.smooth_l1_loss(x, ones)]


def recurrent(x: Tensor, start: Tensor, *parameters: Tensor) -> list[Tensor]:
    return list(torch.lstm(x, (start, start), parameters, True, 1, 0.0, True, False, False))


def bags(table: Tensor, places: Tensor, starts: Tensor) -> list[Tensor]:
    return list(torch.embedding_bag(table, places, starts, mode=2))


def written(x: Tensor, row: Tensor) -> list[Tensor]:
    corner = x[1:, :3]
    scattered = [aten.slice_scatter(corner, row[:, :3], 0, 1, 2), aten.select_scatter(corner, row[0, :3], 0, 1)]
    scattered.append(aten.slice_scatter(row.expand(4, 4), row, 0, 1, 2))
    return [aten.copy(corner, row[:, :3].expand(4, 3)), *scattered, aten.diagonal_scatter(corner, row[0, :3])]


CASES: dict[Callable[..., list[Tensor]], list[Tensor]] = {
    losses: [torch.randn(5, 3, 4), torch.ones(5, 3, 4, dtype=torch.int64)],
    recurrent: [torch.randn(5, 3, 4), torch.zeros(1, 3, 8), *(torch.randn(32, *n) for n in ((4,), (8,), (), ()))],
    written: [torch.randn(5, 4), torch.randn(1, 4)],
    bags: [torch.randn(10, 4), torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2])],
}


@pytest.mark.parametrize("compute", CASES, ids=lambda compute: compute.__name__)
def test_corrected_fakes_are_as_real_tensors(compute: Callable[..., list[Tensor]]) -> None:
    def measured(tensors: list[Tensor]) -> list[object]:
        """The peak, and where results lie."""
        with StorageTracker() as tracker:
            results = compute(*tensors)
        layouts = [(t.shape, t.stride(), t.untyped_storage().nbytes()) for t in results]
        return [tracker.peak_bytes, *layouts]

    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in CASES[compute]]
    world = FakeWorld()
    fakes = [world.fake(t) for t in tensors]
    with world.active():
        fake = measured(fakes)
    assert fake == measured(tensors)
