"""Executors that need a cluster: a folder each, with its options, its driver and what a worker must have for it."""
