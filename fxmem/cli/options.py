"""The options of the command line: their names, defaults, environment and help. No torch here: help comes at once.

Each option's default may come from the environment, ``FXMEM_`` and its name in capitals: ``FXMEM_DEVICE=a100-80gb``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

FORMATS = ("text", "json", "markdown", "github")


@dataclass(frozen=True, slots=True)
class Option:
    """One option that commands on a model share."""

    flag: str
    metavar: str
    help: str
    default: str | None = None
    repeated: bool = False

    @property
    def name(self) -> str:
        """The name of its value: ``plan_seconds``."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that sets its default."""
        return f"FXMEM_{self.name.upper()}"


OF_MODEL = (
    Option("--arg", "K=V", "constructor argument, such as num_classes=10", repeated=True),
    Option("--input", "SHAPE", "[name=]32x3x224x224[:dtype][<below], or name=value", repeated=True),
    Option("--batch", "N", "first dimension of every input"),
    Option("--dtype", "TYPE", "of parameters and inputs: fp32, bf16, fp16", "fp32"),
)
OF_STEP = (
    Option("--loss", "NAME", "own, cross_entropy, mse, sum or module:function", "own"),
    Option("--optimizer", "NAME", "of torch.optim, such as adamw, sgd:momentum=0.9, or none", "adamw"),
    Option("--autocast", "TYPE", "bf16 or fp16: forward and loss under autocast"),
    Option("--accumulate", "N", "the input is one of N micro-batches", "1"),
)
OF_MEMORY = (
    Option("--device", "NAME", "cpu, or a GPU by name (fxmem devices)", "cpu"),
    Option("--memory", "SIZE", "what the device has, such as 24GiB"),
    Option("--budget", "SIZE", "what the step may take, such as 8GB"),
)
OF_PLANNING = (Option("--plan-seconds", "S", "about how long to search for plans", "30"),)
OF_OUTPUT = (Option("--format", "NAME", "text, json, markdown or github", "text"),)


@dataclass(frozen=True, slots=True)
class Given:
    """Where an option's value is from."""

    value: str | list[str] | None
    source: str
    """Empty: the command line."""


def add_options(parser: argparse.ArgumentParser, title: str, options: tuple[Option, ...]) -> None:
    """Add a group of options to a parser."""
    group = parser.add_argument_group(title)
    for option in options:
        default = f" ({option.default})" if option.default else ""
        action = "append" if option.repeated else "store"
        group.add_argument(option.flag, metavar=option.metavar, help=option.help + default, action=action)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command's output."""
    add_options(parser, "output", OF_OUTPUT)
    group = parser.add_argument_group()
    group.add_argument("-q", "--quiet", action="store_true", help="the answer in one line; nothing assumed is printed")
    group.add_argument("--no-color", action="store_true", help="no colours, as with NO_COLOR set")


def given(option: Option, arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Given:
    """Return the value of ``option``: from the command line, else the environment, else its default."""
    value = getattr(arguments, option.name, None)
    if value is not None:
        return Given(value, "")
    if environment.get(option.variable):
        text = environment[option.variable]
        return Given(text.split() if option.repeated else text, f"environment {option.variable}")
    return Given([] if option.repeated else option.default, "default")
