"""Changes that keep the method: how the step is computed. Each takes a subject and returns the changed one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fxmem.advice.low_bit import EightBitAdamW
from fxmem.advice.subject import NotApplicable, Subject, cut, floating
from fxmem.profiling.training_step import optimizer_class

Change = Callable[[Subject], Subject]
NUM_PIECES = 8
"""Of the tokens, where head and loss run piece by piece."""


# -- the model -----------------------------------------------------------------------------------------------------------


def inplace_activations(subject: Subject) -> Subject:
    """Let activations and dropout write over their input, where the module can."""
    changed = subject.with_model()
    found = [m for m in changed.model.modules() if getattr(m, "inplace", None) is False]
    if not found:
        raise NotApplicable("no module has an in-place form that is not used yet")
    for module in found:
        module.inplace = True  # type: ignore[assignment]
    return changed


def fused_attention(subject: Subject) -> Subject:
    """Let a model of transformers or timm call scaled_dot_product_attention."""
    if any(getattr(m, "fused_attn", None) is False for m in subject.model.modules()):
        changed = subject.with_model()
        for module in changed.model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = True  # type: ignore[assignment]
        return changed
    used = getattr(getattr(subject.model, "config", None), "_attn_implementation", None)
    if used != "eager":
        raise NotApplicable("no attention that is written out was found" if used is None else f"it runs {used} already")
    changed = subject.with_model()
    model: Any = changed.model
    model.set_attn_implementation("sdpa")
    return changed


def without_cache(subject: Subject) -> Subject:
    """Let a model of transformers return no keys and values."""
    if (
        not getattr(getattr(subject.model, "config", None), "use_cache", False)
        or subject.kwargs.get("use_cache") is False
    ):
        raise NotApplicable("no cache of keys and values is kept")
    changed = subject.with_model()
    model: Any = changed.model
    model.config.use_cache = False
    return changed


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's repeated blocks: of the containers whose children are alike, those that hold most parameters."""
    best: list[torch.nn.Module] = []
    for container in model.modules():
        if isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            alike: dict[type, list[torch.nn.Module]] = {}
            for child in container.children():
                if list(child.children()):
                    alike.setdefault(type(child), []).append(child)
            largest = max(alike.values(), key=len, default=[])
            if len(largest) > 1:
                best += largest
    inner = {id(m) for block in best for m in block.modules() if m is not block}
    return [block for block in best if id(block) not in inner]


def checkpoint_blocks(subject: Subject) -> Subject:
    """Recompute each repeated block in the backward."""
    changed = subject.with_model()
    blocks = blocks_of(changed.model)
    if not blocks:
        raise NotApplicable("no repeated blocks were found: no container holds two like ones")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return changed


def to_other_memory(subject: Subject) -> Subject:
    """Return the subject, if there is memory beside that of its device."""
    if not subject.on_cuda:
        raise NotApplicable("the step is on the CPU: there is no other memory to move to")
    return subject


def with_allocator(subject: Subject) -> Subject:
    """Return the subject, if a caching allocator serves it."""
    if not subject.on_cuda:
        raise NotApplicable("the step is on the CPU: there is no caching allocator")
    return subject


def as_it_is(subject: Subject) -> Subject:
    """Return the subject."""
    return subject


def offload(subject: Subject) -> Subject:
    """Keep saved tensors in host memory."""
    changed = to_other_memory(subject).with_model()
    model = changed.model
    forward = model.forward

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return forward(*args, **kwargs)

    model.forward = offloading
    return changed


class ChunkedHead(torch.nn.Module):
    """A language model of transformers whose head and loss run over pieces of the tokens, recomputed in the backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Any:
        outputs = importlib.import_module("transformers.modeling_outputs")
        hidden = self.model.base_model(input_ids=input_ids, **others)[0]
        rows, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        pieces = zip(rows.chunk(NUM_PIECES), targets.chunk(NUM_PIECES), strict=True)
        losses = [checkpoint(self._loss, piece, target, use_reentrant=False) for piece, target in pieces]
        return outputs.CausalLMOutput(loss=torch.stack(losses).sum() / targets.numel())

    def _loss(self, piece: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(piece)
        return torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum")


def chunked_head(subject: Subject) -> Subject:
    """Take head and loss of a language model of transformers piece by piece: no tensor has all logits."""
    model: Any = subject.model
    is_causal = hasattr(model, "base_model") and hasattr(model, "get_output_embeddings") and "labels" in subject.kwargs
    if (
        not is_causal
        or "input_ids" not in subject.kwargs
        or not type(model).__name__.endswith(("LMHeadModel", "CausalLM"))
    ):
        raise NotApplicable("it is no causal language model of transformers that is given labels by name")
    changed = subject.with_model()
    return replace(changed, model=ChunkedHead(changed.model).train())


# -- the call ------------------------------------------------------------------------------------------------------------


def micro_batches(count: int) -> Change:
    """Return the change to one of ``count`` micro-batches: the last, when the gradients of the others are there."""

    def change(subject: Subject) -> Subject:
        batch = subject.batch
        if batch % count:
            raise NotApplicable(f"a batch of {batch} does not divide by {count}")
        smaller = subject.with_call(lambda t: cut(t, 0, batch // count) if t.dim() and t.shape[0] == batch else t)
        return smaller.with_step(accumulate=True)

    return change


def autocast_bf16(subject: Subject) -> Subject:
    """Run forward and loss under autocast in bfloat16."""
    return _under_autocast(subject, autocast=torch.bfloat16)


def autocast_fp16(subject: Subject) -> Subject:
    """Run forward and loss under autocast in float16, the loss scaled."""
    scaler = torch.amp.GradScaler("cuda" if subject.on_cuda and torch.cuda.is_available() else "cpu")
    return _under_autocast(subject, autocast=torch.float16, scaler=subject.step.scaler or scaler)


def _under_autocast(subject: Subject, **step: Any) -> Subject:
    if subject.step.autocast is not None:
        raise NotApplicable(f"the step runs under autocast in {subject.step.autocast} already")
    if not any(p.dtype is torch.float32 for p in subject.model.parameters()):
        raise NotApplicable("no parameter is in float32")
    return subject.with_step(**step)


def pure_bf16(subject: Subject) -> Subject:
    """Keep everything in bfloat16."""
    if not any(p.dtype is torch.float32 for p in subject.model.parameters()):
        raise NotApplicable("no parameter is in float32")
    changed = subject.with_model()
    changed.model.to(torch.bfloat16)
    return changed.with_call(floating(lambda t: t.detach().to(torch.bfloat16).requires_grad_(t.requires_grad)))


# -- the step ------------------------------------------------------------------------------------------------------------


def gradients_to_none(subject: Subject) -> Subject:
    """Let no gradient stay from step to step."""
    if not subject.step.accumulate:
        raise NotApplicable("gradients are None between steps already")
    return subject.with_step(accumulate=False)


def _class_of(subject: Subject) -> type[torch.optim.Optimizer]:
    given = subject.step.optimizer
    if given is None:
        raise NotApplicable("no optimizer is counted")
    if isinstance(given, str):
        return optimizer_class(given)
    return given if isinstance(given, type) else type(given)


def optimizer(name: str, **options: Any) -> Change:
    """Return the change to another optimizer of ``torch.optim``."""

    def change(subject: Subject) -> Subject:
        _class_of(subject)
        return subject.with_step(optimizer=with_options(optimizer_class(name), **options))

    return change


def eight_bit_optimizer(subject: Subject) -> Subject:
    """Keep the moments of Adam or AdamW in eight bits."""
    cls = _class_of(subject)
    if not issubclass(cls, torch.optim.Adam):
        raise NotApplicable(f"it is for the moments of Adam and AdamW, not for {cls.__name__}")
    return subject.with_step(optimizer=EightBitAdamW)


def optimizer_option(**options: Any) -> Change:
    """Return the change to the same optimizer with these options."""

    def change(subject: Subject) -> Subject:
        given, cls = subject.step.optimizer, _class_of(subject)
        if isinstance(given, torch.optim.Optimizer):
            if not options.keys() <= given.defaults.keys():
                raise NotApplicable(f"{cls.__name__} has no option {', '.join(options)}")
            return subject.with_step(optimizer=with_options(cls, **{**given.defaults, **options}))
        try:
            cls([torch.zeros(1, requires_grad=True)], **options)
        except (TypeError, RuntimeError) as error:
            raise NotApplicable(f"{cls.__name__} takes no {', '.join(options)}") from error
        return subject.with_step(optimizer=with_options(cls, **options))

    return change


def with_options(cls: type[torch.optim.Optimizer], **options: Any) -> type[torch.optim.Optimizer]:
    """Return the class ``cls`` with other defaults."""
    if not options:
        return cls

    def __init__(self: Any, params: Any, **others: Any) -> None:
        cls.__init__(self, params, **{**others, **options})

    made: type[torch.optim.Optimizer] = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})
    return made
