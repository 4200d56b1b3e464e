"""Watching a training loop while it runs: its memory, its budget, and graphs that stay from step to step."""
