"""One training step on fakes, as plain data."""
