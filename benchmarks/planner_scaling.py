"""``python -m benchmarks.planner_scaling``: how planning time grows with the length of the graph.

Prints, for chains of blocks as of a transformer, the CPU seconds of a whole frontier, the plan's overhead at half of the
span and the floor; then the growth exponent, the slope of log(seconds) over log(recipes).
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

from benchmarks.results_file import RESULTS, machine
from fxmem.planners.pareto import cheapest_within
from fxmem.planners.registry import PLANNERS
from tests.synthetic import residual_blocks

NUM_BLOCKS = (15, 60, 150, 500, 1500)
FULL_BLOCKS = (*NUM_BLOCKS, 4000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="up to 20,000 recipes")
    parser.add_argument("--planner", default="auto", choices=sorted(PLANNERS))
    options = parser.parse_args()
    rows = []
    for num_blocks in FULL_BLOCKS if options.full else NUM_BLOCKS:
        profile = residual_blocks(num_blocks, grad_bytes=1)
        start = time.process_time()
        points = PLANNERS[options.planner](profile, seconds=600.0)
        seconds = time.process_time() - start
        low, high = points[-1].peak_bytes, points[0].peak_bytes
        middle = cheapest_within(points, (low + high) // 2)
        assert middle is not None
        row = {
            "recipes": len(profile.recipes),
            "cpu_seconds": round(seconds, 2),
            "points": len(points),
            "overhead_at_half": round(middle.recompute_seconds / profile.step_seconds, 4),
            "floor_share": round(low / high, 4),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    sizes, times = (np.log([row[name] for row in rows]) for name in ("recipes", "cpu_seconds"))
    exponent = float(np.polyfit(sizes, times, 1)[0])
    print(f"growth exponent {exponent:.2f}")
    body = {"machine": machine(), "planner": options.planner, "growth_exponent": round(exponent, 2), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner_scaling.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
