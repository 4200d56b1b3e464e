"""Planning that takes long says so, and may be interrupted."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from fxmem import progress
from tests.exactness import same_bits


def build() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4))
    return nn.Sequential(*blocks, nn.BatchNorm1d(32))


def test_what_is_done_soon_tells_nothing(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxmem.progress.QUIET_SECONDS", 600.0)
    with caplog.at_level(logging.INFO, logger="fxmem"):
        fxmem.optimize(nn.Linear(4, 4), torch.randn(2, 4))
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_what_takes_long_tells_once_what_it_does_and_how_long_it_may_take(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(progress, "TURN_SECONDS", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, logger="fxmem"):
        fxmem.optimize(build(), torch.randn(8, 32), plan_seconds=20)
    (record,) = caplog.records
    assert record.name == "fxmem.planning"
    assert "planning a training step of Sequential: capturing the graph" in record.message
    assert "about 30 s" in record.message
    assert "fxmem: planning a training step of Sequential: profiling" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert not [thread for thread in threading.enumerate() if thread.name == "fxmem-progress"]


def messages_of_passes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "fxmem.passes"]


@pytest.mark.slow
def test_passes_log_nodes_bytes_and_the_difference(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 8))
    x = torch.randn(16, 8)
    least = fxmem.estimate(model, x, optimizer=None).floor_bytes
    with caplog.at_level(logging.DEBUG, logger="fxmem.passes"):
        fxmem.optimize(model, x, budget=least, optimizer=None)
    reorder, inplace, lean, compressed, *emitted = messages_of_passes(caplog)
    assert reorder == "reorder: switched off"
    assert inplace.startswith("inplace: ")
    assert "MB saved for backward" in inplace
    assert "\n-    relu = " in inplace
    assert lean.startswith("lean_backwards: ")
    assert compressed.startswith("compress_saved: ")
    assert "dropout_mask" in compressed
    assert emitted
    assert all(message.startswith("emit: ") for message in emitted)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="fxmem.passes"):
        assert fxmem.estimate(model, x, optimizer=None, inplace=False, compress_saved=False).floor_bytes
    assert messages_of_passes(caplog) == [
        "reorder: switched off",
        "inplace: switched off",
        "lean_backwards: switched off",
        "compress_saved: switched off",
    ]


def test_the_environment_sends_loggers_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fxmem.passes")
    before = list(logger.handlers), logger.level
    try:
        progress.log_to_stderr("passes")
        fxmem.optimize(nn.Linear(4, 4), torch.randn(2, 4), inplace=False)
    finally:
        logger.handlers, level = before
        logger.setLevel(level)
    assert "fxmem.passes: inplace: switched off" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="FXMEM_LOG names 'parses'; known: passes, planning"):
        progress.log_to_stderr("parses")


def state_of_process() -> dict[str, Any]:
    """What planning exchanges for a while: functions of torch, modes, hooks, random numbers."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(("torch.", "transformers."))]
    functions = {
        (module.__name__, name): id(value)
        for module in modules
        for name, value in list(vars(module).items())
        if callable(value) and not name.startswith("__")
    }
    return {
        "functions": functions,
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "threads": [thread.name for thread in threading.enumerate()],
    }


def check_interrupted(model: nn.Sequential, x: torch.Tensor, interrupted: Callable[[], None]) -> None:
    """An interrupt inside ``interrupted`` leaves model and process as they were; planning then works."""
    twin, before = copy.deepcopy(model), state_of_process()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    after = state_of_process()
    after["functions"] = {key: after["functions"].get(key) for key in before["functions"]}
    assert after == before
    assert all(p.grad is None for p in model.parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    optimized = fxmem.optimize(model, x, budget="1GB", **QUICK)
    for candidate in (optimized, twin):
        torch.manual_seed(1)
        candidate(x).sum().backward()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert same_bits(model[-1].running_mean, twin[-1].running_mean)


QUICK: dict[str, Any] = {"optimizer": "sgd", "cost": "cpu", "cache": False}


@functools.cache
def usual_seconds() -> float:
    """Return how long what is interrupted takes, once torch has set up what it sets up once."""
    for _ in range(2):
        start = time.perf_counter()
        assert fxmem.estimate(build(), torch.randn(64, 32), **QUICK).floor_bytes
    return time.perf_counter() - start


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts: of a process that a shell began in the background it is ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.slow
@pytest.mark.usefixtures("planned_anew", "interruptible")
@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_an_interrupt_leaves_model_and_process_as_they_were(share: float) -> None:
    x, model, seconds = torch.randn(64, 32), build(), usual_seconds()

    def interrupted() -> None:
        timer = threading.Timer(share * seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            assert fxmem.estimate(model, x, **QUICK).floor_bytes
            time.sleep(60)  # should it be done before
        finally:
            timer.join()

    check_interrupted(model, x, interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_takes_effect_at_once() -> None:
    pressed = []

    def press_twice() -> None:
        for number in (1, 2):
            pressed.append(number)
            signal.raise_signal(signal.SIGINT)
        pressed.append(3)

    with pytest.raises(KeyboardInterrupt), progress.told("a test", 1.0):
        press_twice()
    assert pressed == [1, 2]
