"""Measurements beside Orbax and the limits of the machine, in one run: `python -m benchmarks`."""
