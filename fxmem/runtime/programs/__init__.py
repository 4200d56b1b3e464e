"""Steps as programs: recorded once, run as straight-line code."""
