"""The table of private names of torch in docs/architecture.md is that of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from fxmem.torch_private import FakeTensorMode, saved_tensor_hooks_allowed, storage_key
from tests.private_names import PACKAGE, names_in


def _rows() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield name and files of each row of the table in docs/architecture.md."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    section = text.partition("## Private names of torch\n")[2].partition("\n## ")[0]
    for name, files in re.findall(r"^\| `([^`]+)` \| (.+?) \|", section, re.MULTILINE):
        yield name, frozenset(re.findall(r"`([^`]+)`", files))


def test_the_table_of_private_names_is_that_of_the_code() -> None:
    found = {name: frozenset(uses) for name, uses in names_in().items()}
    assert dict(_rows()) == found, "docs/architecture.md lists other names than python -m tests.private_names"


def test_private_names_are_found_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nimport torch.x._y as z\nfrom torch._ops import OpOverload as Op\nC = torch._C\n"
        "def own(t, _mine=0):\n    t._version, t._mine, C._deep.f(), z.g, Op\n"
        "    getattr(t, '_text'), f'_get_{t}', torch.ops.aten._op, t.update(_key=1)\n"
    )
    found = {name: uses.total() for name, uses in names_in(tmp_path).items()}
    named = {"torch._C": 1, "torch._C._deep.f": 1, "torch._ops.OpOverload": 2, "torch.x._y": 1, "torch.x._y.g": 1}
    assert found == {"._get_*": 1, "._key": 1, "._text": 1, "._version": 1, **named}


def test_living_storages_have_keys_of_their_own() -> None:
    with FakeTensorMode():
        tensors = [torch.empty(4) for _ in range(50)]
    keys = [storage_key(tensor) for tensor in tensors]
    assert len(set(keys)) == 50
    assert [storage_key(tensor.view(2, 2)) for tensor in tensors] == keys


def test_it_is_told_where_saved_tensor_hooks_are_disabled() -> None:
    assert saved_tensor_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not saved_tensor_hooks_allowed()
    assert saved_tensor_hooks_allowed()
