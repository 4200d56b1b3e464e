"""Loops of frameworks, one file for each kind of them. Each is tried by :mod:`benchmarks.frameworks`."""
