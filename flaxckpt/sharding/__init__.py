"""Meshes, PartitionSpecs and chunks: who holds which part of an array."""
