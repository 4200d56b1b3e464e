"""The size of the hostile models."""

WIDTH = 8
