"""Modes for forwards on fakes: they notice looks at what fakes do not have, and let ``.data`` be followed."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxmem.errors import CaptureError
from fxmem.torch_private import TorchDispatchMode


class ModeOnFakes(TorchDispatchMode):
    """A mode for ops on fakes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled on fakes, and what keeps torch.compile away would be asked at each op."""
        return False


class TooManyLooks(BaseException):
    """More follows from values than may."""


class FewLooks(ModeOnFakes):
    """Raises ``TooManyLooks`` where more than ``most`` times something follows from values: fakes have none, and a loop
    would wait forever for them to change. Sees inside torch's own Python functions too, where function modes are off."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FROM_VALUES & set(func.tags):
            self._left -= 1
            if self._left < 0:
                raise TooManyLooks
        return func(*args, **(kwargs or {}))


FROM_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DataRead(TorchFunctionMode):
    """Reads ``.data`` as ``.detach()``, which torch.export follows. What is written through it then raises versions, so a
    graph whose backward would read what was overwritten is refused where eager autograd would not notice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET:
            raise CaptureError(
                "the forward assigns to .data of a tensor, which a captured graph would not. Write to it in place, under "
                "torch.no_grad (copy_)."
            )
        return args[0].detach() if func == _GET else func(*args, **(kwargs or {}))


_data: Any = torch.Tensor.data
_GET, _SET = _data.__get__, _data.__set__


class MemoryLooks(TorchFunctionMode):
    """Notes whether a tensor was asked for its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or getattr(func, "__name__", "") in ("data_ptr", "numpy", "__array__", "__reduce_ex__")
        return func(*args, **(kwargs or {}))
