"""A model and its example inputs in, a guarded and validated ATen graph out."""
