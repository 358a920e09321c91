"""Faults put into every system call of a save: kills and errors."""
