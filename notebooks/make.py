"""Writes the notebooks from the texts below and executes them: ``python notebooks/make.py [01 02 ...]``.

A notebook is a list of cells; a text that starts with ``#%`` is code, any other Markdown. Outputs are kept, so the
committed notebooks can be read without running them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
CODE = "#%\n"

QUIET = """#%
import os
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")  # nothing is downloaded
warnings.filterwarnings("ignore")

import torch

import fxmem

torch.manual_seed(0)
torch.set_num_threads(1);"""

GPT = """#%
import sys

sys.path.insert(0, "..")
from benchmarks.libraries import import_torchvision

import_torchvision()  # transformers imports it; on a CPU build of torch its compiled ops need a word first

from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=3, n_head=4, use_cache=False,
                    bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).train()
tokens = torch.randint(3, 512, (4, 128))
batch = {"input_ids": tokens, "labels": tokens}"""

UNET = """#%
from torch import nn
from torch.nn import functional as F

def block(num_in, num_out):
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True),
                         nn.Conv2d(num_out, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))

class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down1, self.down2, self.bottom = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1)))

unet = UNet().train()
images = torch.randn(4, 3, 64, 64)"""

QUICKSTART = (
    """# fxmem in two minutes

A model that trains inside a memory budget, with bitwise the same gradients. Here a small GPT-2 on the CPU; on a GPU
nothing changes but the device.""",
    QUIET,
    GPT,
    """## How much does a training step take?

`fxmem.estimate` follows the whole step (forward, loss, backward, optimizer) on fake tensors: nothing is computed.""",
    """#%
estimate = fxmem.estimate(model, example_kwargs=batch, optimizer="adamw")
print(estimate)""",
    """## Give it a budget

One call. The result is still your model: same parameters, same `state_dict` keys, `train()` and `eval()` as before.""",
    """#%
import copy

reference = copy.deepcopy(model)  # the original, to compare with
budget = (2 * estimate.floor_bytes + estimate.peak_bytes) // 3
optimized = fxmem.optimize(model, example_kwargs=batch, budget=budget, optimizer="adamw")
optimized.report""",
    """## Train

The peak of a real step is measured and set beside the prediction, and the gradients beside those of the original
model, bit by bit. There is dropout in this model; its masks are the same.""",
    """#%
def train_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):  # the second step is one of the steady state: the optimizer has its moments
        torch.manual_seed(step)
        with fxmem.track(model, optimizer, batch) as memory:
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return output.loss.item(), memory.peak_bytes

def gradients_of(model):
    torch.manual_seed(7)
    model(**batch).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found

ours, theirs = gradients_of(optimized), gradients_of(reference)
print("gradients bitwise equal:", all(torch.equal(ours[name], theirs[name]) for name in theirs))

loss, peak = train_step(optimized)
eager_loss, eager_peak = train_step(reference)
print(f"loss          {loss:.6f}   original {eager_loss:.6f}")
print(f"peak measured {peak / 1e6:.3f} MB   original {eager_peak / 1e6:.3f} MB   budget {budget / 1e6:.3f} MB")
print(f"predicted     {optimized.report.predicted_peak_bytes / 1e6:.3f} MB")
assert loss == eager_loss
assert peak == optimized.report.predicted_peak_bytes <= budget""",
    """## See it""",
    """#%
optimized.report.plot_memory()""",
    """## What does not fit is refused, with numbers""",
    """#%
try:
    fxmem.optimize(reference, example_kwargs=batch, budget="10MB")
except fxmem.InfeasibleBudgetError as error:
    print(error)""",
)

WHERE = (
    """# Where the memory of a training step goes

Two models, a UNet and a GPT: what holds the memory at the peak, how it comes and goes, and what a plan changes.""",
    QUIET,
    UNET,
    """## A UNet, as it is""",
    """#%
print(fxmem.estimate(unet, images, optimizer="sgd"))""",
    """Nearly all of it is activations, kept for the backward pass. Long skip connections are the reason why simple
checkpointing of stretches of layers does little here: they cross every cut.

## The same UNet at a third of the way from its floor""",
    """#%
free = fxmem.optimize(unet, images, optimizer="sgd").report
budget = free.floor_bytes + (free.eager_peak_bytes - free.floor_bytes) // 3
optimized = fxmem.optimize(unet, images, budget=budget, optimizer="sgd")
print(optimized.report)""",
    """#%
optimized.report.plot_memory()""",
    """Dots are recomputation. The steep parts are the two highest levels: a few tensors at full resolution.

Before: every module keeps what its backward needs (blue). After: orange is dropped and recomputed on the way back.""",
    """#%
free.draw_graph()""",
    """#%
optimized.report.draw_graph()""",
    """## A GPT""",
    GPT,
    """#%
print(fxmem.estimate(model, example_kwargs=batch, optimizer="adamw"))""",
    """Here the optimizer's two moments, the weights and their gradients take their share, and no plan changes it. The
activations are spread evenly over the blocks.""",
    """#%
free = fxmem.optimize(model, example_kwargs=batch).report
budget = free.floor_bytes + (free.eager_peak_bytes - free.floor_bytes) // 4
optimized = fxmem.optimize(model, example_kwargs=batch, budget=budget)
optimized.report.plot_memory()""",
    """#%
optimized.report.draw_graph(depth=3)""",
    """Attention's probabilities and the hidden layer of the MLP are large and cheap to make again, so they go first.""",
)

FRONTIER = (
    """# Budgets, and what each costs

`fxmem.frontier` plans all budgets at once: from keeping everything to the least peak any plan reaches.""",
    QUIET,
    GPT,
    """#%
points = fxmem.frontier(model, example_kwargs=batch, optimizer="adamw")
print(len(points), "plans; the first, some in between, the last:")
for point in points[:: max(1, len(points) // 8)] + points[-1:]:
    print(f"budget {point.budget_bytes / 1e6:7.2f} MB   extra time {point.overhead_ratio:7.1%} (estimate)")""",
    """#%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
near = [p for p in points if p.overhead_ratio < 0.4]
axes.step([p.budget_bytes / 1e6 for p in near], [100 * p.overhead_ratio for p in near], where="pre", color="#1d6fb8")
axes.axvline(points[-1].budget_bytes / 1e6, color="#c1121f", linestyle="--", label="least reachable peak")
axes.set(xlabel="budget, MB", ylabel="extra time a step, % (estimate)", ylim=(0, 40))
axes.legend(frameon=False)
axes.grid(alpha=0.25)""",
    """The curve falls steeply first: the first megabytes are saved by recomputing what costs next to nothing. Near the
floor every further byte is dear, for whole stretches are run again and again. A good budget lies at the bend.

## Budgets are kept

Five budgets, each trained for real: the measured peak is the predicted one, to the byte, and never above the budget.""",
    """#%
import copy

low, high = points[-1].budget_bytes, points[0].budget_bytes
print("   budget    predicted     measured   extra time (estimate)")
for share in (1.0, 0.75, 0.5, 0.25, 0.1):
    budget = low + int(share * (high - low))
    trained = fxmem.optimize(copy.deepcopy(model), example_kwargs=batch, budget=budget, optimizer="adamw")
    optimizer = torch.optim.AdamW(trained.parameters())
    for _ in range(2):
        with fxmem.track(trained, optimizer, batch) as memory:
            output = trained(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    report = trained.report
    print(f"{budget:9d} {report.predicted_peak_bytes:12d} {memory.peak_bytes:12d}   {report.overhead_ratio:6.1%}")
    assert memory.peak_bytes == report.predicted_peak_bytes <= budget""",
    """## The largest batch""",
    """#%
estimate = fxmem.estimate(model, example_kwargs=batch, optimizer="adamw")
for recompute in (False, True):
    size = estimate.max_batch_size("100MB", recompute=recompute)
    print(f"100 MB hold a batch of {size:3d}", "with recomputation" if recompute else "as the model is")""",
)

FIVE = '''#%
from torch import nn

class Five(nn.Module):
    """Five ops. Every tensor in it is 16 x 16 floats: 1 KiB."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        a = x @ self.weight
        b = torch.tanh(a)
        c = torch.exp(b)
        d = torch.sin(c)
        return torch.cos(d)

model, x = Five(), torch.randn(16, 16)'''

HOW = (
    """# How it works: five ops, byte by byte

The smallest model that shows every step: capture, profile, plan, simulate, emit, run. Each tensor weighs 1 KiB, so
every number below can be checked by hand. (The same numbers stand in `tests/test_five_ops.py`.)""",
    QUIET,
    FIVE,
    """## Capture

`torch.export` gives a flat graph of ATen ops *before* autograd, so that autograd runs through it as through the model.""",
    """#%
from fxmem.capture import capture
from fxmem.captured import Inputs

inputs = Inputs.of((x,), {})
captured = capture(model, inputs)
print(captured.graph_module.code)""",
    """## Profile

The graph runs once on fake tensors, forward and backward, while fxmem watches which storages each op creates and which
ones autograd saves. Nothing is computed, and no table of ops is needed. `tanh` and `exp` save their results, `sin` and
`cos` their inputs; so the results of `tanh`, `exp` and `sin` must be there in backward, and `exp`'s is wanted twice.""",
    """#%
from fxmem.profile import profile
from fxmem.timing import PRESETS

found = profile(captured, inputs, PRESETS["cpu"].seconds).profile

def name(storages):
    return ", ".join(found.storages[s].name for s in storages)

print(f"{'op':8} {'reads':8} {'creates':8} {'autograd saves':15} bytes")
for node in found.nodes:
    nbytes = found.storages[node.creates[0]].nbytes
    print(f"{node.name:8} {name(node.reads):8} {name(node.creates):8} {name(node.saves):15} {nbytes}")""",
    """The step is a sequence of *ticks*. Between them only bytes move that no plan can change: batch, weight, gradients,
the loss (a scalar of 4 bytes, its gradient another 4).""",
    """#%
print(f"{'phase':10} {'op':8} {'needs':6} {'unmanaged bytes, at most':25}")
for tick in found.ticks:
    op = found.nodes[tick.node].name if tick.node is not None else ""
    print(f"{tick.phase:10} {op:8} {name(tick.unpacks):6} {tick.peak_bytes}")""",
    """## Simulate

`simulate` adds what is kept. If nothing is dropped: at the start 2048 bytes (batch and weight); each op adds 1024 and
lets go of what nobody needs, `matmul`'s result at once. The backward of `cos` is the peak: the batch, the weight, four
results, the scalar loss and its gradient, and three gradients of 1 KiB at the same time: 9 x 1024 + 8 bytes.""",
    """#%
from fxmem.simulate import keep_all, simulate

before = simulate(found, keep_all(found), with_steps=True)
for step in before.steps:
    print(f"{step.phase:10} {step.label:10} {step.live_bytes:6}", "<- peak" if step.live_bytes == before.peak_bytes else "")
assert before.peak_bytes == 9 * 1024 + 8 == 9224""",
    """## Plan

The least peak any plan reaches drops `tanh` and `exp`, two of three results. `sin`'s is needed at the very start of
backward, so dropping it would gain nothing. (`inplace=False` leaves out another of fxmem's means, ops that write over
inputs nobody needs any more, to keep the example small.)""",
    """#%
least = fxmem.optimize(model, x, optimizer=None, inplace=False).report.floor_bytes
optimized = fxmem.optimize(model, x, budget=least, optimizer=None, inplace=False)
plan = optimized.plan
print(f"budget {least} bytes; dropped:", name(s for s in plan.dropped if found.storages[s].num_saves))
after = simulate(found, plan, with_steps=True)
for step in after.steps:
    print(f"{step.phase:10} {step.label:10} {step.live_bytes:6}", "recomputed" if step.recompute else "",
          "<- peak" if step.live_bytes == after.peak_bytes else "")
assert after.peak_bytes == least == 7 * 1024 + 8 == 7176""",
    """In backward, `sin` asks for `exp`'s result: `matmul`, `tanh` and `exp` run again. Then `tanh`'s own result is
asked for; keeping it since would have been 1 KiB too much, so two ops run once more.

## Emit

The plan becomes a new graph. A node whose saved tensors the plan drops runs under a *tape*: what autograd saves there
is a handle instead of the tensor.""",
    """#%
print(optimized.graph_module.code)""",
    """## Run

The real step, measured: the planned peak, to the byte, and the gradient of the original, to the bit.""",
    """#%
def step(forward):
    model.weight.grad = None
    with fxmem.track(model, x) as memory:
        output = forward(x)
        loss = output.sum()
        loss.backward()
    return memory.peak_bytes, model.weight.grad

peak, gradient = step(optimized)
eager_peak, eager_gradient = step(model)
print("peak", peak, "instead of", eager_peak)
print("gradients bitwise equal:", torch.equal(gradient, eager_gradient))
assert (peak, eager_peak) == (7176, 9224)
assert torch.equal(gradient, eager_gradient)""",
    """#%
optimized.report.plot_memory()""",
)

NOTEBOOKS = {
    "01_quickstart": QUICKSTART,
    "02_where_memory_goes": WHERE,
    "03_budgets_and_frontier": FRONTIER,
    "04_how_it_works": HOW,
}


def notebook_of(texts: tuple[str, ...]) -> nbformat.NotebookNode:
    """Return the unexecuted notebook of ``texts``."""
    cells = []
    for i, text in enumerate(texts):
        code = text.startswith(CODE)
        make = nbformat.v4.new_code_cell if code else nbformat.v4.new_markdown_cell
        cell = make(text.removeprefix(CODE))
        cell.id = f"cell-{i}"
        cells.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


def main(prefixes: list[str]) -> None:
    """Write and execute the notebooks whose names start with one of ``prefixes``; all if there are none."""
    for name, texts in NOTEBOOKS.items():
        if prefixes and not name.startswith(tuple(prefixes)):
            continue
        notebook = notebook_of(texts)
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(HERE)}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of execution would differ on every run
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, HERE / f"{name}.ipynb")
        print(f"wrote {name}.ipynb", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
