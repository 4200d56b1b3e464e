"""What a person reads: tables of a plan and of where memory goes."""

from fxmem.report.text import Report, build_report

__all__ = ["Report", "build_report"]
