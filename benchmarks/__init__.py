"""Benchmarks: fxmem beside every peer that runs, the papers' own tables, and the pictures made from both."""
