"""Runs Python on the emulated device: ``python -m tests.cuda_stub.launch h100-80gb script.py ...`` (or ``-m module``).

In: a device of ``fxmem.devices``, the stub as ``make test-cuda-stub`` builds it, the environment with the CUDA
build of torch. Out: the process's own exit status.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fxmem.devices import DeviceModel, device_named

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("FXMEM_CUDA_VENV", ".venv-torch-2.14.1") / "bin/python"
LIBRARY = ROOT / "build/cuda_stub/libcuda.so.1"


def is_built() -> bool:
    """True if there is an environment with torch for CUDA, and a stub for it."""
    return PYTHON.exists() and LIBRARY.exists()


def environment(device: DeviceModel) -> dict[str, str]:
    """Return the environment in which a process finds ``device``."""
    major, minor = device.capability
    return {
        **os.environ,
        "LD_PRELOAD": str(LIBRARY),
        "TRITON_LIBCUDA_PATH": str(LIBRARY.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "FXMEM_STUB_NAME": f"{device.name} (emulated)",
        "FXMEM_STUB_CAPABILITY": str(10 * major + minor),
        "FXMEM_STUB_SMS": str(device.num_sms),
        "FXMEM_STUB_THREADS_PER_SM": str(device.threads_per_sm),
        "FXMEM_STUB_SHARED_PER_SM": str(device.shared_per_sm_bytes),
        "FXMEM_STUB_BYTES": str(device.memory_bytes),
    }


def run(arguments: list[str], device: str = "h100-80gb", **options: object) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` on ``device``; ``options`` are those of ``subprocess.run``."""
    command = [str(PYTHON), *arguments]
    return subprocess.run(command, env=environment(device_named(device)), cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


if __name__ == "__main__":
    if not is_built():
        sys.exit("the stub is not built: make test-cuda-stub")
    sys.exit(run(sys.argv[2:], sys.argv[1]).returncode)
