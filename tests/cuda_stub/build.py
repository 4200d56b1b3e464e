"""Builds the stub for the torch of a Python: ``python -m tests.cuda_stub.build OUT [PYTHON]``.

In: the C sources beside this file, the wheels' CUDA headers, gcc and nm. Out: ``OUT/libcuda.so.1``, to be preloaded. It
holds the runtime, cuBLAS, cuDNN and the driver; what the sources do not define of the functions that torch's libraries
ask for, or that ``cuda.h`` declares, is generated: a call that is counted and does nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ASKED_FOR = re.compile(r"(__cuda|cuda|cublas|cudnn|cu)[A-Z]\w*")
NOT_STUBBED = re.compile(r"cublasXt|cuFile")
"""Libraries that torch loads but no training step calls; the real ones stay."""


def build(out: Path, python: str = sys.executable) -> Path:
    """Build the stub for the torch of ``python`` in ``out``; return the path of the library."""
    out.mkdir(parents=True, exist_ok=True)
    site = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    includes = [HERE / "headers", site / "nvidia/cu13/include", site / "nvidia/cudnn/include"]
    compiler = ["gcc", "-O1", "-fPIC", "-w", f"-I{HERE}", *(f"-I{path}" for path in includes)]
    objects = []
    for source in sorted(HERE.glob("*.c")):
        objects.append(out / f"{source.stem}.o")
        subprocess.run([*compiler, "-c", str(source), "-o", str(objects[-1])], check=True)
    missing = (_asked_for(site) | _declared_by_driver(compiler)) - _defined(objects)
    generated = out / "generated.c"
    generated.write_text(
        '#include "stub.h"\n' + "".join(f"int {name}(void) {{ COUNTED; return 0; }}\n" for name in sorted(missing))
    )
    objects.append(out / "generated.o")
    subprocess.run([*compiler, "-fno-builtin", "-c", str(generated), "-o", str(objects[-1])], check=True)
    library = out / "libcuda.so.1"
    link = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), *map(str, objects), "-lpthread", "-ldl"]
    subprocess.run(link, check=True)
    return library


def _asked_for(site: Path) -> set[str]:
    """Names of CUDA functions that torch's libraries leave to be found."""
    libraries = [str(path) for path in sorted((site / "torch/lib").glob("libtorch_*.so"))]
    libraries += [str(site / "torch/lib" / name) for name in ("libc10_cuda.so", "libcaffe2_nvrtc.so")]
    lines = _output("nm", "-D", "--undefined-only", *libraries).splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines if " U " in line}
    return {name for name in names if ASKED_FOR.fullmatch(name) and not NOT_STUBBED.match(name)}


def _declared_by_driver(compiler: list[str]) -> set[str]:
    """Names of the driver's functions, as the linker knows them."""
    text = subprocess.run(
        [*compiler, "-E", "-include", "cuda.h", "-"], input="", capture_output=True, text=True, check=True
    )
    return set(re.findall(r"CUresult\s+(cu[A-Z]\w*)\s*\(", text.stdout))


def _defined(objects: list[Path]) -> set[str]:
    return {
        line.split()[-1] for line in _output("nm", "--defined-only", *map(str, objects)).splitlines() if " T " in line
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), *sys.argv[2:3]))
