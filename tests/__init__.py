"""Tests of flaxckpt."""
