"""From a profile to a frontier of plans, each judged by the simulator. Nothing here imports torch."""
