"""Readers of the formats that other libraries write: one file a format."""
