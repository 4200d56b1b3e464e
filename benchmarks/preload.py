"""Imported once by the server that forks measuring processes: the slow imports, and nothing that starts a thread."""

import contextlib
import logging
import warnings

import torch
import torch._dynamo

import benchmarks.measure
from benchmarks.libraries import import_torchvision

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)
import_torchvision()
with contextlib.suppress(ImportError):
    import timm
    import transformers
    import transformers.models.gpt2.modeling_gpt2

__all__ = ["benchmarks", "timm", "transformers"]
