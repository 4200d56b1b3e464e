"""The table of habits: each a row of data, with a pure function from a subject to the changed one.

In: a :class:`Subject`. Out: another, or ``NotApplicable`` with the reason. Nothing is said here of what a habit brings:
that is estimated, with the change made (:mod:`fxmem.advice.evaluate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from fxmem.advice import changes, method_changes, skips
from fxmem.advice.subject import Subject


class Disruption(IntEnum):
    """How far a change reaches, the least first."""

    NONE = 0
    """Loss and gradients are the same bits."""
    SUM_ORDER = 1
    """The same numbers but for the order in which they are added."""
    NUMERICS = 2
    """Other precision, other rounding, or another optimizer's arithmetic."""
    METHOD = 3
    """Another model, batch or rule of learning: another experiment."""

    def __str__(self) -> str:
        return ("none", "order of sums", "numerics", "method")[self]


@dataclass(frozen=True, slots=True)
class Habit:
    """One row."""

    name: str
    label: str
    disruption: Disruption
    change: Callable[[Subject], Subject]
    line: str
    """What to write."""
    group: str
    """Of two habits of one group, only one can be had."""
    with_batch_norm: tuple[Disruption, str] | None = None
    """How far it reaches where a BatchNorm is in training mode, and what it does to it."""
    measured_as: str = "step"
    """``step``: the changed model's own; ``plan``: what fxmem's plan makes of it; ``graph``: its graph's, without the names
    that the model's code holds values by; others are keys of :data:`fxmem.advice.evaluate.BESIDE`."""
    allow: tuple[str, ...] = ()
    """Of plans: what they may do (``allow=`` of :func:`fxmem.optimize`)."""
    also: str = ""
    """What else it does."""

    def reach(self, subject: Subject) -> tuple[Disruption, str]:
        """Return how far it reaches in a subject, and what else it does."""
        normed = any(isinstance(m, method_changes.BATCH_NORMS) and m.training for m in subject.model.modules())
        return self.with_batch_norm if normed and self.with_batch_norm is not None else (self.disruption, self.also)


def of_choice(
    name: str,
    choice: str,
    label: str,
    disruption: Disruption,
    group: str,
    change: Callable[[Subject], Subject] = changes.as_it_is,
    also: str = "",
) -> Habit:
    """Return the row of one choice of ``allow=`` alone."""
    line = f'model = fxmem.optimize(model, budget=..., allow=("{choice}",))'
    return Habit(name, label, disruption, change, line, group, measured_as="plan", allow=(choice,), also=also)


N, S, V, M = Disruption.NONE, Disruption.SUM_ORDER, Disruption.NUMERICS, Disruption.METHOD

HABITS: tuple[Habit, ...] = (
    # What the model is.
    Habit("attention", "fused attention kernels", V, changes.fused_attention,
          'model.set_attn_implementation("sdpa")', "attention"),
    Habit("cache", "no cache of keys and values", N, changes.without_cache, "model.config.use_cache = False", "cache"),
    Habit("inplace", "in-place activations", N, changes.inplace_activations,
          "nn.ReLU(inplace=True)", "inplace"),
    Habit("chunked_head", "head and loss in eight pieces", S, changes.chunked_head,
          "loss = sum(checkpoint(head_and_loss, piece) for piece in hidden.chunk(8))", "head"),
    Habit("pooling", "global pooling before a linear layer", M, method_changes.global_pooling,
          "nn.AdaptiveAvgPool2d(1)", "pooling"),
    Habit("downsampling", "the first convolution at twice its stride", M, method_changes.early_downsampling,
          "nn.Conv2d(..., stride=2 * stride)  # the first", "size"),
    Habit("skips", "no long connections (skips)", M, skips.without_skips,
          "x = block(x)  # instead of x + block(x)", "skips"),
    Habit("frozen_norms", "frozen BatchNorm", M, method_changes.frozen_norms,
          "m.eval().requires_grad_(False)  # for each BatchNorm m, after model.train()", "norms"),
    Habit("frozen_half", "first half of the blocks frozen", M, method_changes.frozen_half,
          "block.requires_grad_(False)  # for each block of the first half", "frozen"),
    Habit("lora", "LoRA of rank 8, all else frozen", M, method_changes.lora,
          "peft.get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))", "frozen"),
    # What it is called with.
    Habit("half_length", "sequences of half the length", M, method_changes.half_length,
          "tokens = tokens[:, : tokens.shape[1] // 2]", "size"),
    Habit("half_resolution", "images of half the width and height", M, method_changes.half_resolution,
          "images = F.interpolate(images, scale_factor=0.5)", "size"),
    Habit("micro_2", "two micro-batches", S, changes.micro_batches(2),
          "(loss / 2).backward()  # for each half of the batch, then optimizer.step()", "batch",
          (M, "BatchNorm then normalizes over half the batch")),
    Habit("micro_4", "four micro-batches", S, changes.micro_batches(4),
          "(loss / 4).backward()  # for each quarter of the batch, then optimizer.step()", "batch",
          (M, "BatchNorm then normalizes over a quarter of the batch")),
    Habit("half_batch", "half the batch", M, method_changes.half_batch,
          "DataLoader(..., batch_size=batch_size // 2)", "batch"),
    of_choice("microbatch", "microbatch", "fxmem's micro-batches, up to 16", S, "batch"),
    # In which precision.
    Habit("autocast_bf16", "autocast in bfloat16", V, changes.autocast_bf16,
          'with torch.autocast(device_type, torch.bfloat16): loss = ...', "precision"),
    Habit("autocast_fp16", "autocast in float16 with a GradScaler", V, changes.autocast_fp16,
          'scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()', "precision",
          also="bfloat16 needs no scaler"),
    Habit("pure_bf16", "all in bfloat16", V, changes.pure_bf16,
          "model = model.to(torch.bfloat16)", "precision"),
    # How it is stepped.
    Habit("set_to_none", "gradients set to None", N, changes.gradients_to_none,
          "optimizer.zero_grad(set_to_none=True)", "gradients"),
    Habit("sgd", "SGD without momentum", M, changes.optimizer("SGD"),
          "torch.optim.SGD(model.parameters(), lr)", "optimizer"),
    Habit("momentum", "SGD with momentum", M, changes.optimizer("SGD", momentum=0.9),
          "torch.optim.SGD(model.parameters(), lr, momentum=0.9)", "optimizer"),
    Habit("adafactor", "Adafactor", M, changes.optimizer("Adafactor"),
          "torch.optim.Adafactor(model.parameters())", "optimizer"),
    Habit("adamw_8bit", "AdamW with its moments in eight bits", V, changes.eight_bit_optimizer,
          "bitsandbytes.optim.AdamW8bit(model.parameters())", "optimizer",
          also="estimated with moments of the same size; bitsandbytes adds 2 KB of tables"),
    of_choice("optimizer_in_backward", "optimizer_in_backward", "fxmem's steps within the backward", N,
              "gradients", also="no gradients are left to clip by norm, to accumulate or to scale"),
    Habit("single_tensor", "the optimizer one tensor at a time", N, changes.optimizer_option(foreach=False),
          "torch.optim.AdamW(..., foreach=False)", "optimizer_kernel"),
    Habit("fused", "the fused optimizer", V, changes.optimizer_option(fused=True),
          "torch.optim.AdamW(..., fused=True)", "optimizer_kernel"),
    # How the forward is run.
    Habit("offload", "saved tensors in host memory", N, changes.offload,
          "with torch.autograd.graph.save_on_cpu(): loss = ...", "recompute"),
    Habit("checkpoint", "torch's checkpoint around each block", N, changes.checkpoint_blocks,
          "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)", "recompute",
          (V, "BatchNorm's statistics are then updated twice a step")),
    Habit("names", "intermediates let go after their last use", N, changes.as_it_is,
          "del x  # or no name for it", "names", measured_as="graph"),
    of_choice("chunk", "chunk", "fxmem's chunks of head, loss and MLPs", S, "head"),
    of_choice("planned_offload", "offload", "fxmem's offload to host memory", N,
              "offload", changes.to_other_memory),
    Habit("plan", "fxmem's plan", N, changes.as_it_is,
          "model = fxmem.optimize(model, budget=...)", "recompute", measured_as="plan", allow=("recompute", "inplace")),
    # What is around it.
    Habit("no_grad", "no gradients in evaluation", N, changes.as_it_is,
          "with torch.no_grad(): ...  # and model.eval()", "evaluation", measured_as="evaluation"),
    Habit("expandable_segments", "segments of the allocator that grow", N, changes.with_allocator,
          "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "allocator", measured_as="expandable"),
    Habit("empty_cache", "the allocator's cache emptied after each step", N, changes.with_allocator,
          "torch.cuda.empty_cache()", "allocator", measured_as="emptied"),
    Habit("collect", "garbage collected after each step", N, changes.as_it_is,
          "gc.collect()", "collect", measured_as="cycles"),
)  # fmt: skip
"""In the order in which several are made."""
