"""The longest sequence that Llama-3-8B with LoRA trains on one card of 80 GB: ``python -m benchmarks.lengths``.

Predicted from the configuration alone, on an emulated H100: all 32 layers, bf16, batch 1, LoRA of rank 16 on queries and
values (peft's default for Llama), AdamW. By choices: recomputation alone; heads and MLPs in pieces too; values in host
memory too. Of the plans, those count whose recomputations and waits for the link, what MLPs in pieces run again included,
take no longer than one more forward pass. The longest multiple of :data:`STEP` tokens is looked for to 2 %: what is there
beside parameters and state is all but proportional to the length. The plan at that length is then emitted and its step run
on fakes, which tells what CUDA's allocator makes of it. ALST (Bekman et al. 2025) sweeps lengths so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from benchmarks.below_the_floor import LossAlone
from benchmarks.libraries import import_library
from benchmarks.results_file import RESULTS, machine
from fxmem.capture.export import capture
from fxmem.capture.graph import Inputs
from fxmem.devices import device_named
from fxmem.emitted import emit_point
from fxmem.fake.fake_tensors import FakeWorld
from fxmem.fake.stand_in import standing_in
from fxmem.frontiers import frontier_of
from fxmem.ir import FrontierPoint
from fxmem.passes.choices import DEFAULT
from fxmem.passes.context import CompileContext, Settings
from fxmem.pipeline import profile_for_short_memory
from fxmem.planners.offload.link import sent_bytes
from fxmem.profiling.profile import Profiled
from fxmem.profiling.roofline import PRESETS
from fxmem.profiling.training_step import TrainingStep
from fxmem.runtime.chunked_ops import ChunkedRows
from fxmem.torch_patches import as_in_training, without_dynamo

PATH = RESULTS / "lengths.json"
CARD = device_named("h100-80gb")
BUDGET_BYTES = 80 * 10**9
"""Of the card's 84.9 GB; the rest is left to the CUDA context and to what the allocator cannot use."""
NUM_LAYERS = 32
STEP = 1024
ALLOWED = {
    "recompute": DEFAULT,
    "+ chunk": (*DEFAULT, "chunk"),
    "+ offload": (*DEFAULT, "chunk", "offload"),
}
STARTS = {"recompute": 34, "+ chunk": 146, "+ offload": 560}
"""In steps: where the search begins."""
NEAR = 0.02
"""Of what beside parameters and state the budget has room for: what may be left of it."""


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest sequence under one set of choices."""

    allow: str
    """A key of :data:`ALLOWED`."""
    tokens: int
    eager_bytes: int
    """Of the step of that length that keeps all, planned."""
    peak_bytes: int
    """Planned."""
    allocated_bytes: int
    """Of the emitted step on fakes, by the model of CUDA's allocator."""
    host_bytes: int
    """What is copied to host memory."""
    overhead_ratio: float
    """Of the eager step's estimated time."""
    choices: tuple[str, ...]
    """What was done beside recomputing."""
    plan_seconds: float
    """By the clock, all of the search."""


# -- one length --------------------------------------------------------------------------------------------------------


def model_of(num_layers: int) -> nn.Module:
    """Return so many layers of Llama-3-8B, its base frozen, on the device of the context."""
    transformers, peft = import_library("transformers"), import_library("peft")
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2**23,
        rope_theta=500_000.0,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return LossAlone(peft.get_peft_model(model, lora)).train()


@dataclass(frozen=True, slots=True)
class Length:
    """What can be done at one length."""

    tokens: int
    context: CompileContext
    world: FakeWorld
    profiled: Profiled
    points: tuple[FrontierPoint, ...]

    @property
    def best(self) -> FrontierPoint:
        """The plan of the least peak that takes at most one more forward pass."""
        limit = self.profiled.profile.forward_seconds - self.rerun_seconds
        return min((p for p in self.points if p.recompute_seconds <= limit), key=lambda point: point.peak_bytes)

    @property
    def rerun_seconds(self) -> float:
        """What MLPs in pieces take in the backward to run their forward again."""
        graph = self.profiled.captured.graph_module.graph
        calls = [node for node in graph.nodes if node.op == "call_function"]
        return sum(
            node.seconds
            for call, node in zip(calls, self.profiled.profile.nodes, strict=True)
            if isinstance(call.target, ChunkedRows)
        )

    def allocated_bytes(self) -> int:
        """Return what the step under that plan allocates, by the model of CUDA's allocator."""
        with _on_card(self.world, self.context.model):
            return emit_point(self.profiled, self.context, self.best).bound_bytes


@contextmanager
def _on_card(world: FakeWorld, model: nn.Module) -> Iterator[None]:
    with as_in_training(), without_dynamo(), standing_in(CARD), world.state_of(model):
        yield


def planned(tokens: int, allow: Sequence[str], plan_seconds: float, num_layers: int = NUM_LAYERS) -> Length:
    """Return what choices can do at one length; nothing is allocated."""
    with torch.device("meta"):
        model, batch = model_of(num_layers), torch.zeros(1, tokens, dtype=torch.int64)
    inputs = Inputs.of((batch,), {})
    world = FakeWorld(inputs.leaves, "cuda", moved=True)
    moved = Inputs(tuple(world.fake_all(leaf) for leaf in inputs.leaves), inputs.spec)
    step = TrainingStep(optimizer="adamw")
    settings = Settings(None, step, "auto", plan_seconds, PRESETS["h100"], cache=False, allow=frozenset(allow))
    context = CompileContext(model, moved, settings)
    with _on_card(world, model):
        profiled = profile_for_short_memory(capture(model, moved), context)
        return Length(tokens, context, world, profiled, frontier_of(profiled.profile, context))


# -- the longest -------------------------------------------------------------------------------------------------------


def longest(name: str, plan_seconds: float) -> Longest:
    """Return the longest sequence under the choices called ``name``."""
    start = time.perf_counter()
    steps, fitting, failing = STARTS[name], 0, 10**6
    best: Length | None = None
    while fitting < steps < failing:
        length = planned(steps * STEP, ALLOWED[name], plan_seconds)
        peak_bytes, static_bytes = length.best.peak_bytes, length.profiled.profile.static.total_bytes
        print(f"{name}, {length.tokens:,} tokens: {peak_bytes / 1e9:.2f} GB", flush=True)
        room = (BUDGET_BYTES - static_bytes) / (peak_bytes - static_bytes)
        if room >= 1:
            best, fitting = length, steps
            if room < 1 + NEAR:
                break
        else:
            failing = steps
        steps = min(max(int(room * steps), fitting + 1), failing - 1)
    assert best is not None, "the search ends at a length that fits"
    point, profile = best.best, best.profiled.profile
    return Longest(
        allow=name,
        tokens=best.tokens,
        eager_bytes=best.points[0].peak_bytes,
        peak_bytes=point.peak_bytes,
        allocated_bytes=best.allocated_bytes(),
        host_bytes=sum(sent_bytes(profile, point.plan).values()),
        overhead_ratio=(point.recompute_seconds + best.rerun_seconds) / profile.step_seconds,
        choices=tuple(map(str, best.profiled.captured.choices)),
        plan_seconds=time.perf_counter() - start,
    )


_LABELS = {"+ offload": "+ chunk, offload (sums in another order)"}


def text() -> str:
    """Return the committed results as a table."""
    results = json.loads(PATH.read_text(encoding="utf-8"))
    rows = [Longest(**row) for row in results["lengths"]]
    lines = [
        "| choices | longest sequence | it keeps all in | planned peak | allocated | in host memory | extra time |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {_LABELS.get(row.allow, row.allow)} | {row.tokens:,} | {row.eager_bytes / 1e9:.0f} GB | "
            f"{row.peak_bytes / 1e9:.2f} GB | {row.allocated_bytes / 1e9:.2f} GB | "
            f"{row.host_bytes / 1e9:.0f} GB | {row.overhead_ratio:.0%} |"
            for row in rows
        ),
        "",
        f"From `benchmarks/results/lengths.json` (torch {results['machine']['torch']}, {results['machine']['date']}).",
    ]
    return "\n".join(lines)


def main() -> int:
    """Search, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan-seconds", type=float, default=20.0, help="CPU time for the plans of one length")
    parser.add_argument("--allow", nargs="+", choices=tuple(ALLOWED), default=list(ALLOWED))
    arguments = parser.parse_args()
    rows = json.loads(PATH.read_text(encoding="utf-8"))["lengths"] if PATH.exists() else []
    rows = [row for row in rows if row["allow"] not in arguments.allow]
    for name in arguments.allow:
        rows.append(asdict(longest(name, arguments.plan_seconds)))
        rows.sort(key=lambda row: list(ALLOWED).index(row["allow"]))
        PATH.write_text(json.dumps({"machine": machine(), "lengths": rows}, indent=1) + "\n", encoding="utf-8")
    print(text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
