"""What a first answer takes, from the start of the process: ``python -m benchmarks.startup``.

Runs ``fxmem estimate torchvision:resnet50 --input 32x3x224x224`` in processes of its own: several times plain, for the wall
and CPU time, once with Python's import times, by package, and once with a profile. Out: a table, and
``results/startup.json``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.results_file import RESULTS, machine

PATH = RESULTS / "startup.json"
COMMAND = ("estimate", "torchvision:resnet50", "--input", "32x3x224x224", "-q")
NUM_RUNS = 5
PACKAGES = ("torch._dynamo", "torch.distributed", "torch", "sympy", "networkx", "numpy", "torchvision", "fxmem")
"""Of imports; each is counted without those named before it."""
STAGES = {
    "model made": ("cli/models.py", "load_model"),
    "optimizer's step seen": ("profiling/optimizer_on_meta.py", "usual_step"),
    "forward": ("profiling/verify.py", "forward"),
    "backward": ("torch/_tensor.py", "backward"),
    "estimate": ("api/estimate.py", "estimate"),
}
"""Of the profile: file and function."""
PROFILED = """
import cProfile, pstats, sys
from fxmem.cli.main import main
profile = cProfile.Profile()
profile.enable()
main(sys.argv[1:])
profile.disable()
pstats.Stats(profile).dump_stats("{path}")
"""


def run(*arguments: str) -> tuple[float, float, str]:
    """Return wall and CPU seconds of a process, and what it writes to stderr."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def import_seconds(report: str) -> dict[str, float]:
    """Return the seconds of imports by package, from what ``-X importtime`` writes."""
    seconds: Counter[str] = Counter()
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", report):
        package = next((p for p in PACKAGES if name == p or name.startswith(p + ".")), "others")
        seconds[package] += int(own) / 1e6
    return dict(seconds)


def stage_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of the stages of a profile; a profiled function takes longer than by itself."""
    import pstats

    stats: Any = pstats.Stats(str(path))
    found: Counter[str] = Counter()
    for (file, _, function), (_, _, _, cumulative, _) in stats.stats.items():
        for stage, (ending, name) in STAGES.items():
            if file.endswith(ending) and function == name:
                found[stage] = max(found[stage], cumulative)
    return dict(found)


def main() -> None:
    """Measure, print and write."""
    runs = [run("-m", "fxmem", *COMMAND)[:2] for _ in range(NUM_RUNS)]
    imports = import_seconds(run("-X", "importtime", "-m", "fxmem", *COMMAND)[2])
    profile = PATH.with_suffix(".prof")
    run("-c", PROFILED.format(path=profile), *COMMAND)
    stages = stage_seconds(profile)
    profile.unlink()
    facts = {
        "command": "fxmem " + " ".join(COMMAND),
        "wall_seconds": [round(wall, 2) for wall, _ in runs],
        "cpu_seconds": [round(cpu, 2) for _, cpu in runs],
        "import_seconds": {name: round(s, 2) for name, s in sorted(imports.items(), key=lambda pair: -pair[1])},
        "profiled_seconds": {name: round(s, 2) for name, s in stages.items()},
    }
    print(
        f"wall {statistics.median(facts['wall_seconds'])} s, CPU {statistics.median(facts['cpu_seconds'])} s (medians)"
    )
    print(tabulate(facts["import_seconds"].items(), headers=("imports", "s")))
    print(tabulate(facts["profiled_seconds"].items(), headers=("stage, profiled", "s")))
    PATH.write_text(json.dumps({"machine": machine(), **facts}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
