"""What advice tells of a habit is what a real step of the changed model takes; the smallest stack that fits is found."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.advice import Stepper, applied
from benchmarks.libraries import import_library
from fxmem.advice.evaluate import Evaluator, Row, row_of
from fxmem.advice.habits import HABITS, Disruption
from fxmem.advice.lengths import habits_of, lengths_of
from fxmem.advice.low_bit import EightBitAdamW
from fxmem.advice.subject import Subject
from fxmem.profiling.training_step import TrainingStep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.norm(self.conv(x)))


class Images(nn.Module):
    """Convolutions, a pooling to more than one pixel, and wide linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(2)))
        self.pool = nn.AdaptiveAvgPool2d((4, 4))
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(images))).flatten(1))


class Tokens(nn.Module):
    """Embedded tokens, blocks with dropout, and a head over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        layer = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def images() -> Subject:
    return Subject(Images().train(), (torch.randn(8, 3, 16, 16),), {}, TrainingStep(loss_fn=mean_square))


def tokens() -> Subject:
    return Subject(Tokens().train(), (torch.randint(0, 64, (4, 16)),), {}, TrainingStep(loss_fn=mean_square))


def advice_on(subject: Subject, **options: Any) -> fxmem.Advice:
    return fxmem.advise(subject.model, subject.args, step=subject.step, **PLANNING, **options)


PLANNING: dict[str, Any] = {"planner": "chen", "cost": "cpu"}  # whose plans do not depend on the time it has
FOR_CUDA = {"offload", "planned_offload", "expandable_segments", "empty_cache"}
APPLICABLE_TO_NEITHER = {"attention", "cache", "chunked_head", "set_to_none", "microbatch", *FOR_CUDA}
OF_PLAIN_LAYERS = {"adamw_8bit", "autocast_bf16", "autocast_fp16", "chunk", "optimizer_in_backward", "plan", "skips"}


def plain() -> Subject:
    """Layers that are added to their input."""
    layers = [nn.Sequential(Added(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)), nn.ReLU()) for _ in range(2)]
    return Subject(nn.Sequential(*layers).train(), (torch.randn(64, 96),), {}, TrainingStep(loss_fn=mean_square))


class Added(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def rows_on(subject: Subject, names: set[str], budget: int | None = None, **options: Any) -> dict[str, Row]:
    """Return the rows of these habits."""
    base = fxmem.estimate(subject.model, subject.args, step=subject.step, device=subject.device, **options)
    evaluator = Evaluator(subject.as_ghost(), {**PLANNING, **options}, budget)
    return {habit.name: row_of(habit, evaluator, base, budget) for habit in HABITS if habit.name in names}


def told_is_measured(subject: Subject, names: set[str]) -> set[str]:
    """Return those of the habits that can be had, each as told."""
    told = {name: row.peak_bytes for name, row in rows_on(subject, names).items() if row.peak_bytes is not None}
    for habit in (habit for habit in HABITS if habit.name in told):
        assert Stepper(applied(habit, subject, **PLANNING)).peak_bytes() == told[habit.name], habit.name
    return set(told)


@pytest.mark.slow
def test_what_is_told_of_a_habit_is_what_the_changed_model_takes() -> None:
    assert told_is_measured(plain(), OF_PLAIN_LAYERS) == OF_PLAIN_LAYERS


@pytest.mark.exhaustive
def test_all_habits_of_a_cpu_are_what_is_told_on_images_or_tokens() -> None:
    names = {habit.name for habit in HABITS}
    had = told_is_measured(images(), names) | told_is_measured(tokens(), names)
    assert had == names - APPLICABLE_TO_NEITHER


@pytest.mark.slow
def test_habits_of_a_gpu_are_told_without_one() -> None:
    subject = replace(plain(), device="cuda:a100-80gb")
    rows = rows_on(subject, FOR_CUDA | {"adamw_8bit"})
    assert all(row.peak_bytes is not None for row in rows.values())
    assert (rows["adamw_8bit"].saved_bytes or 0) > 0
    assert rows["expandable_segments"].saved_bytes == 0
    assert "of reserved bytes" in rows["expandable_segments"].note
    found = fxmem.estimate(subject.model, subject.args, step=subject.step, device=subject.device, budget_of="reserved")
    grown, emptied = found.cuda_with(expandable_segments=True), found.cuda_with(empty_cache=True)
    assert found.cuda is not None
    assert grown.allocated_bytes == emptied.allocated_bytes == found.cuda.allocated_bytes
    reserved = rows_on(subject, {"expandable_segments"}, budget_of="reserved")["expandable_segments"]
    assert reserved.saved_bytes == found.bound_bytes - grown.reserved_bytes


@pytest.mark.slow
def test_a_batch_runs_in_as_many_micro_batches_as_a_budget_needs() -> None:
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(3))
    subject = Subject(nn.Sequential(*layers).train(), (torch.randn(64, 32),), {}, TrainingStep(loss_fn=mean_square))
    budget = int(0.9 * fxmem.estimate(subject.model, subject.args, step=subject.step).peak_bytes)
    told = rows_on(subject, {"microbatch"}, budget)["microbatch"]
    assert told.fits
    (habit,) = (habit for habit in HABITS if habit.name == "microbatch")
    assert Stepper(applied(habit, subject, budget, **PLANNING)).peak_bytes() == told.peak_bytes
    assert "pass budget=" in rows_on(subject, {"microbatch"})["microbatch"].note


def test_images_that_are_flattened_are_pooled_instead() -> None:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 512), nn.Linear(512, 5)
    subject = Subject(nn.Sequential(*layers).train(), (torch.randn(2, 3, 8, 8),), {}, TrainingStep(loss_fn=mean_square))
    assert told_is_measured(subject, {"pooling"}) == {"pooling"}
    saved = rows_on(subject, {"pooling"})["pooling"].saved_bytes
    assert saved is not None
    assert saved >= 3 * 4 * 512 * (4 * 64 - 4)  # weight and two moments
    (habit,) = (habit for habit in HABITS if habit.name == "pooling")
    assert habit.change(subject).model[3].linear.in_features == 4
    assert rows_on(plain(), {"pooling"})["pooling"].note == "no argument is a batch of images"


def test_evaluation_is_told_with_and_without_gradients() -> None:
    for subject in (plain(), images()):
        found = fxmem.estimate(subject.model, subject.args, step=subject.step)
        stepper = Stepper(subject.with_model())
        stepper.step()
        told = [found.evaluation_peak_bytes(no_grad=way) for way in (False, True)]
        assert told == [stepper.evaluation_bytes(no_grad=way) for way in (False, True)]
        assert told[0] > told[1]
        assert all(module.training for module in subject.model.modules())


class Cyclic(nn.Linear):
    """Its forward leaves a tensor in a list that holds itself."""

    def forward(self, x: Tensor) -> Tensor:
        held: list[Any] = [x * 2]
        held.append(held)
        return super().forward(x)


def test_what_cycles_hold_after_a_step_is_told() -> None:
    x = torch.randn(8, 64)
    for model, nbytes in ((Cyclic(64, 64), x.nbytes), (nn.Linear(64, 64), 0)):
        found = fxmem.estimate(model.train(), x)
        stepper = Stepper(Subject(model, (x,), {}, TrainingStep()))
        stepper.step()
        assert found.cyclic_bytes() == stepper.cyclic_bytes() == nbytes


def test_lengths_of_the_data_have_rows() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16)).train()
    subject = Subject(model, (torch.zeros(8, 20, dtype=torch.int64),), {}, TrainingStep(loss_fn=mean_square))
    lengths = [4] * 10 + [12] * 9 + [40]
    rows = habits_of(lengths_of(lengths))
    assert [row.change(subject).args[0].shape for row in rows] == [(8, 12), (8, 12), (8, 40), (2, 40)]
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, 7:] = 0
    assert lengths_of([{"attention_mask": mask}, torch.zeros(3, 9, dtype=torch.int64)]) == [7, 9, 9, 9, 30]
    with pytest.raises(fxmem.InputError, match="without a batch of sequences of integers"):
        lengths_of([torch.zeros(2, 3)])


def test_moments_in_eight_bits_take_a_byte_each_and_follow_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(100, 100), nn.Linear(100, 100)
    theirs.load_state_dict(ours.state_dict())
    eight, plain_one = EightBitAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for model, optimizer in ((ours, eight), (theirs, plain_one)):
        model(torch.ones(4, 100)).square().sum().backward()
        optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-3)
    held = sum(t.nbytes for state in eight.state.values() for name in ("first", "second") for t in state[name])
    assert held == 2 * (100 * 100 + 4 * 40) + 2 * 4 * 100


@pytest.mark.slow
def test_the_smallest_stack_that_fits_fits_when_it_is_made() -> None:
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(3))
    subject = Subject(nn.Sequential(*layers).train(), (torch.randn(256, 32),), {}, TrainingStep(loss_fn=mean_square))
    eager = advice_on(subject)
    one = advice_on(subject, budget=eager["half_batch"].peak_bytes)
    assert one.stack is not None
    assert one.stack.fits
    assert len(one.stack.names) == 1
    assert one[one.stack.names[0]].fits
    budget = int(0.25 * eager.peak_bytes)
    several = advice_on(subject, budget=budget)
    assert several.stack is not None
    assert several.stack.fits
    assert 2 <= len(several.stack.names) <= 4
    changed = subject
    for habit in (habit for habit in HABITS if habit.name in several.stack.names):
        changed = applied(habit, changed, budget, **PLANNING)
    assert Stepper(changed).peak_bytes() == several.stack.peak_bytes
    none = advice_on(subject, budget=1000)
    assert none.stack is not None
    assert not none.stack.fits
    assert none.verdict.startswith("no 4 of these changes were found to fit")


@pytest.mark.slow
def test_the_model_given_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).train()
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    advice = fxmem.advise(model, torch.randn(8, 16), optimizer=optimizer, plan_seconds=1, cost="cpu")
    assert [type(m) for m in model.modules()] == kinds
    assert not model[1].inplace
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert advice["momentum"].saved_bytes == 0
    assert advice["sgd"].saved_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.slow
def test_rows_say_what_they_bring_or_why_not() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).train()
    advice = fxmem.advise(model, torch.randn(8, 16), budget="1GB", plan_seconds=1, cost="cpu")
    assert advice.verdict.startswith("it fits as it is")
    assert advice.stack is None
    assert "brings nothing: it frees nothing at the peak, the" in advice["single_tensor"].note
    assert advice["offload"].note == "the step is on the CPU: there is no other memory to move to"
    assert advice["half_resolution"].peak_bytes is None
    ranks = {str(disruption): disruption for disruption in Disruption}
    fitting = [row for row in advice.rows if row.fits]
    assert [ranks[row.disruption] for row in fitting] == sorted(ranks[row.disruption] for row in fitting)
    assert advice.to_dict()["rows"][0]["peak_bytes"] == advice.rows[0].peak_bytes
    assert "fits as it is" in advice["plan"].note
    assert "no tensor of the step is in a cycle" in advice["collect"].note
    assert advice["no_grad"].note.count("evaluation of such a batch peaks at") == 1
    assert "| habit" in advice.to_markdown()
    with pytest.raises(fxmem.InputError, match="no habit is called 'magic'; known are"):
        advice["magic"]


@pytest.mark.slow
def test_the_head_in_pieces_gives_the_loss_of_the_whole_in_less_memory() -> None:
    transformers = import_library("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(0, 256, (4, 64))
    subject = Subject(model, (), {"input_ids": ids, "labels": ids}, TrainingStep(optimizer="adamw"))
    (habit,) = (habit for habit in HABITS if habit.name == "chunked_head")
    changed = habit.change(subject)
    expected, found = (s.model(**s.kwargs).loss for s in (subject, changed))
    assert torch.allclose(expected, found, atol=1e-5)
    told = fxmem.estimate(changed.model, (), changed.kwargs, step=changed.step)
    assert Stepper(changed).peak_bytes() == told.peak_bytes
    assert told.peak_bytes < fxmem.estimate(model, (), subject.kwargs, step=subject.step).peak_bytes
