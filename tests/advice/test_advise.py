"""What advice tells of a habit is what a real step of the changed model takes; the smallest stack that fits is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from benchmarks.advice import Stepper, applied
from benchmarks.libraries import import_library
from fxmem.advice.habits import HABITS, Disruption
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
APPLICABLE_TO_NEITHER = {"attention", "cache", "chunked_head", "set_to_none", "offload"}


@pytest.mark.slow
def test_what_is_told_of_each_habit_is_what_the_changed_model_takes() -> None:
    had = set()
    for subject in (images(), tokens()):
        advice = advice_on(subject)
        assert Stepper(subject.with_model()).peak_bytes() == advice.peak_bytes
        for habit in HABITS:
            told = advice[habit.name].peak_bytes
            if told is not None:
                had.add(habit.name)
                assert Stepper(applied(habit, subject, **PLANNING)).peak_bytes() == told, habit.name
    assert had == {habit.name for habit in HABITS} - APPLICABLE_TO_NEITHER


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
