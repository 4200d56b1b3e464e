"""fxmem's planner in Inductor's seat: a compiled training step under a budget in bytes."""
