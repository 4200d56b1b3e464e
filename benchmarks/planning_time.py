"""``python -m benchmarks.planning_time``: the CPU seconds of a first ``fxmem.optimize``, by stage.

Each case runs in a process of its own, on one thread, with an empty disk cache. The stages exclude each other: what
``capture`` runs of ``validate`` counts as the latter. ``python -m benchmarks.planning_time resnet50`` runs one case;
``--digest`` prints what was planned (peaks, plan and graph), to compare two versions of fxmem.

Out: a table, and ``results/planning_time.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from tabulate import tabulate

STAGES = {
    "capture": (("fxmem.api.size_families", "capture"),),
    "validate": (("fxmem.capture.export", "check_faithful"),),
    "profile": (("fxmem.passes.context", "profile"),),
    "eager step": (("fxmem.pipeline", "eager_step"),),
    "plan": (("fxmem.pipeline", "frontier_of"), ("fxmem.pipeline", "lower_bound")),
    "emit": (("fxmem.emitted", "run_passes"),),
    "verify": (("fxmem.emitted", "verify"),),
}
"""By stage: module and name of the functions that are it."""
LIMITS = {"resnet50": 6, "gpt2": 8, "gpt_120_layers": 25, "rnn_120_steps": 20, "gpt2_lora": 10}
"""By case, the CPU seconds of ``optimize`` that are aimed for."""


class StageTimes:
    """CPU seconds of functions, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running = ["other"]
        self._since = time.process_time()

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        self._turn()
        self._running.append(stage)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def watch(self, stage: str, module: Any, name: str) -> None:
        """Count the calls of a function as ``stage``."""
        original = getattr(module, name)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(stage):
                return original(*args, **kwargs)

        setattr(module, name, timed)


# -- cases -------------------------------------------------------------------------------------------------------------


def resnet50() -> tuple[Any, dict[str, Any]]:
    import torch

    from benchmarks.libraries import import_torchvision

    return import_torchvision().models.resnet50(), {"example_args": torch.randn(8, 3, 224, 224)}


def _gpt2() -> Any:
    from benchmarks.libraries import import_library

    transformers = import_library("transformers")
    config = transformers.GPT2Config(n_embd=192, n_head=4, n_layer=12, vocab_size=1000, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def _texts() -> dict[str, Any]:
    import torch

    ids = torch.randint(0, 1000, (4, 128))
    return {"example_kwargs": {"input_ids": ids, "labels": ids}}


def gpt2() -> tuple[Any, dict[str, Any]]:
    return _gpt2(), _texts()


def gpt2_lora() -> tuple[Any, dict[str, Any]]:
    """peft's defaults on the same model."""
    model = _gpt2()
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")), _texts()


def gpt_120_layers() -> tuple[Any, dict[str, Any]]:
    """A decoder of PyTorch's modules: about 3,800 nodes."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x)
            heads = [part(y).view(*x.shape[:2], 4, -1).transpose(1, 2) for part in (self.query, self.key, self.value)]
            scores = heads[0] @ heads[1].transpose(-2, -1) / heads[0].shape[-1] ** 0.5
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            weights = self.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1))
            mixed = (weights @ heads[2]).transpose(1, 2).reshape(x.shape)
            x = x + self.dropout(self.out(mixed))
            return x + self.dropout(self.mlp(self.norm2(x)))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 32)
            self.blocks = nn.ModuleList(Block(32) for _ in range(120))
            self.head = nn.Linear(32, 100)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Decoder(), {"example_args": torch.randint(0, 100, (4, 32))}


def rnn_120_steps() -> tuple[Any, dict[str, Any]]:
    """An LSTM written out, of 120 time steps."""
    import torch
    from torch import nn

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates, self.head = nn.Linear(32 + 64, 4 * 64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = x.new_zeros(x.shape[0], 64)
            for t in range(x.shape[1]):
                i, f, g, o = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return self.head(h)

    return Unrolled(), {"example_args": torch.randn(16, 120, 32)}


CASES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    case.__name__: case for case in (resnet50, gpt2, gpt_120_layers, rnn_120_steps, gpt2_lora)
}


# -- one case ----------------------------------------------------------------------------------------------------------


def digest_of(report: Any, graph_module: Any) -> dict[str, Any]:
    """Return what must not change as planning gets faster."""
    code = "\n".join(f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph_module.graph.nodes)
    code = "\n".join(line.split(" at 0x")[0] for line in code.splitlines())
    return {
        "planned_bytes": report.predicted_peak_bytes,
        "floor_bytes": report.floor_bytes,
        "eager_bytes": report.eager_peak_bytes,
        "recompute_seconds": report.overhead_seconds,
        "graph": hashlib.sha256(code.encode()).hexdigest()[:16],
    }


def measure(name: str) -> dict[str, Any]:
    """Return the seconds of one case, in this process, with what was planned."""
    start = time.process_time()
    import importlib

    import fxmem

    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    model, example = CASES[name]()
    imports = time.process_time() - start
    times = StageTimes()
    for stage, functions in STAGES.items():
        for module, function in functions:
            times.watch(stage, importlib.import_module(module), function)
    start = time.process_time()
    optimized = fxmem.optimize(model, **example, budget="70%", cache=False)
    seconds = time.process_time() - start
    with times.of("other"):
        pass
    report, graph_module = optimized.fxmem.report, optimized.fxmem.graph_module
    stages = {"imports and model": imports, **{stage: times.seconds[stage] for stage in (*STAGES, "other")}}
    return {
        "case": name,
        "nodes": len(graph_module.graph.nodes),
        "optimize": round(seconds, 2),
        "limit": LIMITS[name],
        "stages": {stage: round(s, 2) for stage, s in stages.items()},
        "digest": digest_of(report, graph_module),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--digest", action="store_true", help="print what was planned")
    parser.add_argument("--here", action="store_true", help="one case, in this process, as JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.cases[0])))
        return
    rows = []
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.planning_time", "--here", name],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "FXMEM_CACHE_DIR": cache},
            )
        row = json.loads(done.stdout.splitlines()[-1])
        digest = row.pop("digest")
        rows.append(row)
        if options.digest:
            print(name, json.dumps(digest), flush=True)
    table = [{**{k: v for k, v in row.items() if k != "stages"}, **row["stages"]} for row in rows]
    print(tabulate(table, headers="keys"))
    if not options.cases:
        from benchmarks.results_file import RESULTS, machine

        (RESULTS / "planning_time.json").write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
