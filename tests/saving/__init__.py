"""Tests of saving: plans, snapshots, and one checkpoint in several calls."""
