"""Models as the command line names them.

In: ``package.module:factory``, ``path/model.py:Net``, ``torchvision:resnet50``, ``timm:convnext_tiny``, ``hf:gpt2`` or
``hf:path/to/config.json``, and constructor arguments. Out: a :class:`LoadedModel`. Models are made on the meta device, so
that the largest take no memory, and on the CPU where that is not possible. Nothing is downloaded.

Errors: ``InputError``, in one sentence with the known names.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fxmem.cli.assumptions import Assumed
from fxmem.errors import InputError, first_lines
from fxmem.torch_patches import without_dynamo

Arguments = dict[str, Any]
NAMED = 6
"""As many known names are named."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in training mode, and how it came about."""

    module: torch.nn.Module
    name: str
    inputs: tuple[str, ...] = ()
    """Of one call, as ``--input`` takes them, where the model's library knows them."""
    assumed: tuple[Assumed, ...] = ()
    has_loss: bool = False
    """Whether its output has the loss, given labels."""


def load_model(spec: str, arguments: Arguments, on_meta: bool = True) -> LoadedModel:
    """Return the model that ``spec`` names."""
    source, colon, name = spec.partition(":")
    if not colon or not name:
        raise InputError(
            f"{spec!r} names no model: write package.module:factory, path/model.py:Net, torchvision:NAME, timm:NAME, "
            "hf:MODEL_TYPE or hf:path/to/config.json"
        )
    loaded = {"torchvision": _torchvision, "timm": _timm, "hf": _hugging_face}.get(source)
    with without_dynamo(), torch.device("meta" if on_meta else "cpu"):
        found = loaded(name, arguments) if loaded is not None else _own(source, name, arguments)
    return LoadedModel(found.module.train(), spec, found.inputs, found.assumed, found.has_loss)


def library(name: str) -> Any:
    """Return an imported library. Errors: ``InputError`` if it is not installed."""
    try:
        return beside_torchvision(lambda: importlib.import_module(name))
    except ImportError as error:
        raise InputError(f"{name} cannot be imported here ({first_lines(error)}): pip install {name}") from error


def beside_torchvision(load: Callable[[], Any]) -> Any:
    """Return what ``load`` imports. Where torchvision's compiled operators do not load (it was built for another torch),
    its import stops at the first that is missing; their schemas let it through, and a step on fakes calls none of them."""
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    declared = torch.library.Library("torchvision", "DEF")
    declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(declared)
    return load()


_DECLARED: list[torch.library.Library] = []
"""A library takes its schemas along when it is collected."""


def _built(what: str, factory: Callable[..., Any], arguments: Arguments) -> torch.nn.Module:
    try:
        module = factory(**arguments)
    except (TypeError, ValueError) as error:
        takes = f"; it takes {', '.join(names)}" if (names := _parameters_of(factory)) else ""
        raise InputError(f"{what} cannot be made with these arguments: {first_lines(error)}{takes}") from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"{what} makes a {type(module).__name__}, not a torch.nn.Module")
    return module


def _parameters_of(factory: Callable[..., Any]) -> list[str]:
    """Return the names of a factory's own parameters, as far as they can be told."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def unknown(what: str, name: str, known: Sequence[str]) -> InputError:
    """Return the error that names the nearest of the known names."""
    near = difflib.get_close_matches(name, known, NAMED, 0.5) or sorted(known)[:NAMED]
    near += [each for each in known if each not in near][: NAMED - len(near)]
    more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
    return InputError(f"no {what} is called {name!r}; known are {', '.join(near)}{more}")


# -- where models come from ---------------------------------------------------------------------------------------------


def _torchvision(name: str, arguments: Arguments) -> LoadedModel:
    models = library("torchvision.models")
    if name not in models.list_models():
        raise unknown("model of torchvision", name, models.list_models())
    factory = models.get_model_builder(name)
    return LoadedModel(_built(f"torchvision's {name}", factory, {"weights": None} | arguments), name)


def _timm(name: str, arguments: Arguments) -> LoadedModel:
    timm = library("timm")
    if not timm.is_model(name):
        raise unknown("model of timm", name, timm.list_models())
    module = _built(f"timm's {name}", lambda **given: timm.create_model(name, **given), arguments)
    size = getattr(module, "pretrained_cfg", {}).get("input_size")
    if not size:
        return LoadedModel(module, name)
    shape = "x".join(map(str, (1, *size)))
    return LoadedModel(module, name, (shape,), (Assumed("input", shape, "timm's configuration of the model"),))


_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
    "AutoModel",
)
"""Of transformers, the first that takes a configuration makes the model, where the configuration names no class."""
MOST_TOKENS = 1024
"""Of the sequence that is assumed where none is given."""


def _hugging_face(name: str, arguments: Arguments) -> LoadedModel:
    transformers = library("transformers")
    path = Path(name)
    if path.exists():
        config = transformers.AutoConfig.from_pretrained(path.parent if path.is_file() else path, local_files_only=True)
        source = f"{path}"
    else:
        types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        if name not in types:
            error = unknown("model type of transformers", name, list(types.keys()))
            raise InputError(f"{error}; nothing is downloaded: for another size pass hf:path/to/config.json or --arg")
        config, source = types[name](), f"transformers' default configuration of model type {name}, not a checkpoint's"
    assumed = [Assumed("configuration", type(config).__name__, source)]
    if getattr(config, "use_cache", False) and "use_cache" not in arguments:
        config.use_cache = False
        assumed.append(Assumed("use_cache", "False", "training needs no cache of keys and values"))
    for key, value in arguments.items():
        if not hasattr(config, key):
            raise unknown(f"setting of {type(config).__name__}", key, sorted(config.to_dict()))
        setattr(config, key, value)
    module = _built(f"transformers' {name}", lambda: _of_config(transformers, config), {})
    inputs, more = _inputs_of(config, module)
    return LoadedModel(module, name, inputs, (*assumed, *more), "labels" in _arguments_of(module))


def _of_config(transformers: Any, config: Any) -> torch.nn.Module:
    """Return the model that a configuration names, else the first of :data:`_HEADS` that takes it."""
    own = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if own is not None:
        return cast(torch.nn.Module, own(config))
    for head in _HEADS:
        with suppress(ValueError):  # it is of another kind
            return cast(torch.nn.Module, getattr(transformers, head).from_config(config))
    raise InputError(f"transformers has no model to train for {type(config).__name__}")


def _arguments_of(module: torch.nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _inputs_of(config: Any, module: torch.nn.Module) -> tuple[tuple[str, ...], tuple[Assumed, ...]]:
    """Return a call of a model of texts: as many tokens as it takes, up to :data:`MOST_TOKENS`; of others none."""
    takes = _arguments_of(module)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    entries = getattr(text, "vocab_size", None)
    if "input_ids" not in takes or not entries:
        return (), ()
    longest = getattr(text, "max_position_embeddings", None) or MOST_TOKENS
    shape = f"1x{min(int(longest), MOST_TOKENS)}:int64<{entries}"
    names: list[str] = [each for each in ("input_ids", "labels") if each in takes]
    if "decoder_input_ids" in takes and "labels" not in takes:
        names.append("decoder_input_ids")
    inputs = tuple(f"{each}={shape}" for each in names)
    return inputs, (Assumed("input", " ".join(inputs), "the configuration; one sequence"),)


def _own(module_name: str, name: str, arguments: Arguments) -> LoadedModel:
    scope = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found: Any = scope
    for part in name.split("."):
        if not hasattr(found, part):
            raise unknown(f"model of {module_name}", name, _candidates(scope))
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module):
        if arguments:
            raise InputError(f"{name} of {module_name} is a model already, and takes no --arg")
        return LoadedModel(found, name)
    if not callable(found):
        raise InputError(
            f"{name} of {module_name} is a {type(found).__name__}, not a function or class that makes a model"
        )
    return LoadedModel(_built(f"{name} of {module_name}", found, arguments), name)


def _candidates(scope: Any) -> list[str]:
    own = [(k, v) for k, v in vars(scope).items() if not k.startswith("_") and callable(v)]
    return [k for k, v in own if getattr(v, "__module__", "") == scope.__name__] or [k for k, _ in own] or ["none"]


def _file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    loader = spec.loader
    with torch.device("cpu"):
        beside_torchvision(lambda: loader.exec_module(module))
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        with torch.device("cpu"):
            return beside_torchvision(lambda: importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        known = "torchvision:NAME, timm:NAME, hf:NAME, path/model.py:NAME"
        raise InputError(f"no module is called {name!r} here; models are also {known}") from error
