"""The architectures of transformers and timm, made small and trained under plans: passed, refused and why, or wrong.

What goes in: the registries of both libraries: one entry for each configuration and kind of task in transformers, one for
each family in timm, that of the smallest variant by name. What comes out: an `Outcome` for each. Configurations are made
small by their own fields, nothing is downloaded; where eager itself cannot train what comes of that, the verdict is
"untrainable". `python -m tests.architecture_table [--only PART]` prints and saves the table and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import queue
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxmem
from benchmarks.libraries import import_library, import_torchvision
from fxmem.capture.graph import Inputs
from fxmem.ir import GraphProfile, Plan
from fxmem.planners.registry import PLANNERS
from tests.exactness import Step, check, differences, passing, run

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "architecture_table.json"
MOST_PARAMETERS = 60_000_000
MOST_SECONDS = 240.0
"""For one architecture."""
SEED = 0
SHARE_IN_PARTS = "90%"
"""Of eager's peak, the budget of a model that is planned in parts."""


@dataclass(frozen=True)
class Outcome:
    """``verdict``: passed, in parts (not captured whole, but `fxmem.optimize` plans its parts), refused, wrong, gave up
    (out of time), or untrainable (eager itself cannot, made so small). ``why``: what refused, also of a model in parts."""

    name: str
    verdict: str
    why: str = ""
    num_recipes: int = 0
    eager_peak_bytes: int = 0


@dataclass(frozen=True)
class Trainable:
    """A small model, the arguments of one call, and the loss (None: the output's own)."""

    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def sum_of_means(output: Any) -> Tensor:
    """The mean squares of all there is to differentiate, added."""
    parts = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in parts]).sum()


def lean(graph_profile: GraphProfile) -> Plan:
    """A plan two thirds of the way down the frontier of minimum cuts."""
    points = PLANNERS["mincut"](graph_profile, seconds=3.0)
    return points[2 * len(points) // 3].plan


PLANS = (passing, lean)


# -- timm --------------------------------------------------------------------------------------------------------------

SMALL = (
    "test_", "atto", "femto", "pico", "nano", "tiny", "xxs", "xs", "micro", "mini", "small", "_t", "_s", "18", "050",
)  # fmt: skip
"""Parts of the names of small variants, the smallest first."""
SHALLOW: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1, 1), "num_blocks": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
)
"""Arguments that make a large timm model smaller, where it takes them."""
LARGE = 15_000_000
"""Parameters from which these are tried."""
IMAGE_SIZES = (64, 96, 128)


def timm_families() -> Iterator[tuple[str, Callable[[], Trainable]]]:
    """Yield one entry for each module of timm."""
    timm = import_library("timm")
    for family in timm.list_modules():
        name = min(timm.list_models(module=family), key=_size_by_name)
        yield f"timm/{family}/{name}", partial(_timm_model, name)


def _size_by_name(name: str) -> tuple[int, int, str]:
    return next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), len(name), name


def _timm_model(name: str) -> Trainable:
    timm = import_library("timm")

    def build(options: dict[str, Any]) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
        return model.train()

    model, options = build({}), {}
    config: dict[str, Any] = model.default_cfg  # type: ignore[assignment]
    if _num_parameters(model) > LARGE:
        options = next((o for o in SHALLOW if _trains(partial(build, o), ()) is None), {})
    channels, *_, size = config["input_size"]
    sizes = [] if config.get("fixed_input_size") else [s for s in IMAGE_SIZES if s < size]
    for side in (*sizes, size):
        images = (torch.randn(2, channels, side, side),)
        error = _trains(partial(build, options), images)
        if error is None:
            return Trainable(partial(build, options), images, {}, sum_of_means)
    raise Untrainable(error)


# -- transformers ------------------------------------------------------------------------------------------------------

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
WIDTHS = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 64, "intermediate_size": 96, "d_ff": 96,
    "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "ffn_hidden_size": 96, "n_inner": 96, "hidden_dim": 96,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "vocab_size": 128, "max_position_embeddings": 128,
    "n_positions": 128, "image_size": 64, "sliding_window": 8, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEPTHS = {
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_groups": 1, "first_k_dense_replace": 1,
}  # fmt: skip
HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
RANKS = {
    "head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "state_size": 8, "mamba_d_state": 8,
}  # fmt: skip
CHANCES = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
"""Layers skipped by chance, in Python, make another graph in each step: refused, so not asked for here."""
SHRINKS: tuple[dict[str, Any], ...] = (
    CHANCES | WIDTHS | DEPTHS | HEADS | EXPERTS | RANKS,
    CHANCES | WIDTHS | DEPTHS | HEADS | EXPERTS | RANKS | {"head_dim": 8},
    CHANCES | WIDTHS | DEPTHS | HEADS | EXPERTS,
    CHANCES | WIDTHS | DEPTHS | EXPERTS,
    CHANCES | DEPTHS | EXPERTS | {"vocab_size": 128, "use_cache": False},
)
"""Fields of configurations and their values, tried in turn."""


def transformers_models() -> Iterator[tuple[str, Callable[[], Trainable]]]:
    """Yield one entry for each configuration and kind of task."""
    import_torchvision()  # transformers imports it
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        classes = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for config, name in classes.items():
            first = name if isinstance(name, str) else name[0]
            yield f"transformers/{task.lower()}/{config}", partial(_transformers_model, task, config, first)


def _transformers_model(task: str, config_name: str, class_name: str) -> Trainable:
    import transformers

    config_class, model_class = transformers.CONFIG_MAPPING[config_name], getattr(transformers, class_name)
    error: Exception | None = None
    for fields in SHRINKS:
        try:
            config = _shrunk(config_class(), fields)
        except Exception as problem:
            error = problem
            continue

        def build(config: Any = config) -> nn.Module:
            model: nn.Module = model_class(copy.deepcopy(config))
            return model.train()

        for kwargs in _arguments(task, config):
            error = _trains(build, (), kwargs)
            if error is None:
                return Trainable(build, (), kwargs, None if "labels" in kwargs else sum_of_means)
    raise Untrainable(error)


def _shrunk(config: Any, fields: dict[str, Any]) -> Any:
    """Return a configuration of the same class with the fields it has made small, those of its parts as well."""
    given = config.to_dict()
    small: dict[str, Any] = {
        key: value for key, value in fields.items() if isinstance(given.get(key), int | float | None)
    }
    small = {key: value for key, value in small.items() if key in given}
    if "num_key_value_heads" in small and given["num_key_value_heads"] == given.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    kinds = given.get("layer_types")
    if isinstance(kinds, list):
        small["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[: small.get("num_hidden_layers", len(kinds))]
    for key in given:
        if key.endswith("_config") and hasattr(part := getattr(config, key, None), "to_dict"):
            small[key] = _shrunk(part, fields).to_dict()
    return type(config)(**small)


def _arguments(task: str, config: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments of a call to try."""
    ids = torch.randint(3, 60, (2, 16))
    if task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        yield {"input_ids": ids, "labels": ids.clone()}
    elif task == "IMAGE_CLASSIFICATION":
        size = getattr(config, "image_size", 64)
        for side in dict.fromkeys((size if isinstance(size, int) else 64, 64, 224)):
            yield {"pixel_values": torch.randn(2, 3, side, side)}
    else:
        for name, shape in (("input_values", (4000,)), ("input_features", (100, 80)), ("input_values", (1024, 128))):
            yield {name: torch.randn(2, *shape)}


# -- the check ---------------------------------------------------------------------------------------------------------


class Untrainable(Exception):
    """Eager cannot train it."""


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _check_size(build: Callable[[], nn.Module]) -> None:
    num = 0
    with suppress(Exception), torch.device("meta"):  # where that can be built, before it takes memory
        num = _num_parameters(build())
    if num > MOST_PARAMETERS:
        raise Untrainable(f"it has {num / 1e6:.0f} M parameters")


def _trains(
    build: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Exception | None:
    """Return why eager cannot build the model or, with arguments given, not train it; None if it can."""
    try:
        _check_size(build)
        torch.manual_seed(SEED)
        model = build()
        _check_size(lambda: model)
        if args or kwargs:
            output = model(*args, **(kwargs or {}))
            (output.loss if "labels" in (kwargs or {}) else sum_of_means(output)).backward()
    except Exception as error:
        return error
    return None


def outcome(name: str, make: Callable[[], Trainable]) -> Outcome:
    """Train one architecture under plans beside eager."""
    said = partial(_said, name)
    torch.manual_seed(SEED)
    try:
        it = make()
    except Exception as error:
        return said("untrainable", error.args[0] if isinstance(error, Untrainable) else error)
    try:
        found = check(it.build, *it.args, kwargs=it.kwargs, loss=it.loss, plans=PLANS)
    except fxmem.FxMemError as error:
        return _outcome_in_parts(said, it, error)
    except Exception as error:
        return said("wrong", error)
    return Outcome(name, "passed", "", len(found.profiled.profile.recipes), found.eager.peak_bytes)


def _outcome_in_parts(said: Callable[[str, Any], Outcome], it: Trainable, refused: fxmem.FxMemError) -> Outcome:
    """Train, as a user would, a model that is not captured whole."""
    try:
        trained_in_parts(it)
    except fxmem.FxMemError:
        return said("refused", refused)
    except Exception as error:
        return said("wrong", error)
    return said("in parts", refused)


def trained_in_parts(it: Trainable) -> None:
    """Assert that a step of `fxmem.optimize` at :data:`SHARE_IN_PARTS`, or its least budget above that, is eager's step,
    within the budget. Errors: as :func:`fxmem.optimize` tells."""
    inputs = Inputs.of(it.args, it.kwargs)

    def step_of(forward: nn.Module, model: nn.Module) -> Step:
        np.random.seed(SEED)  # which some forwards draw from
        return run(forward, model, inputs, it.loss)

    torch.manual_seed(SEED)
    reference = it.build()
    eager = step_of(reference, reference)
    try:
        model = _optimized(it, SHARE_IN_PARTS)
    except fxmem.InfeasibleBudgetError as error:
        model = _optimized(it, error.least_bytes)
    step = step_of(model, model.fxmem.original)
    found = differences(eager, step)
    assert not found, "\n".join(found)
    most_bytes = model.fxmem.report.budget_bytes
    assert step.peak_bytes <= most_bytes, f"{step.peak_bytes} bytes measured, the budget is {most_bytes}"


def _optimized(it: Trainable, budget: float | str) -> Any:
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is planned in parts
        options: dict[str, Any] = {"optimizer": None, "loss_fn": it.loss, "plan_seconds": 2.0}
        return fxmem.optimize(it.build(), it.args or None, it.kwargs, budget=budget, **options)


def _said(name: str, verdict: str, error: Any) -> Outcome:
    return Outcome(name, verdict, " ".join(f"{type(error).__name__}: {error}".split())[:400])


def _outcome_into(outcomes: multiprocessing.Queue[Outcome], name: str, make: Callable[[], Trainable]) -> None:
    outcomes.put(outcome(name, make))


def in_own_process(name: str, make: Callable[[], Trainable]) -> Outcome:
    """Return the outcome of one architecture, or that it took too long or broke the process."""
    context = multiprocessing.get_context("fork")  # the libraries are imported already
    outcomes: multiprocessing.Queue[Outcome] = context.Queue()
    process = context.Process(target=_outcome_into, args=(outcomes, name, make))
    process.start()
    end = time.monotonic() + MOST_SECONDS
    found = Outcome(name, "gave up", f"after {MOST_SECONDS:.0f} s")
    while time.monotonic() < end:
        try:
            found = outcomes.get(timeout=1.0)
            break
        except queue.Empty:
            if not process.is_alive() and outcomes.empty():
                found = Outcome(name, "wrong", f"the process ended with {process.exitcode}")
                break
    process.kill()
    process.join()
    return found


def save(outcomes: list[Outcome]) -> None:
    """Write the counts and every outcome, with the libraries' versions and the date."""
    counts = Counter(o.verdict for o in outcomes)
    versions = {name: import_library(name).__version__ for name in ("timm", "transformers")}
    facts = {"torch": torch.__version__, **versions, "date": datetime.now(UTC).date().isoformat()}
    body = {**facts, "architectures": len(outcomes), **dict(sorted(counts.items()))}
    rows = [asdict(o) for o in outcomes]
    RESULTS.write_text(json.dumps(body | {"outcomes": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run what is missing, print each outcome, save all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="architectures whose name holds this")
    parser.add_argument("--again", action="store_true", help="those done before, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    body = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"outcomes": []}
    done = {row["name"]: Outcome(**row) for row in body["outcomes"]}
    makes = dict([*transformers_models(), *timm_families()])
    todo = [name for name in makes if options.only in name and (options.again or name not in done)]
    start = time.monotonic()
    for i, name in enumerate(todo):
        done[name] = found = in_own_process(name, makes[name])
        save([done[n] for n in makes if n in done])
        left = (time.monotonic() - start) / (i + 1) * (len(todo) - i - 1) / 60
        print(f"[{i + 1}/{len(todo)}, {left:.0f} min left] {name}: {found.verdict} {found.why[:150]}", flush=True)
    counts = Counter(o.verdict for o in done.values())
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
