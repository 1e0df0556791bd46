"""Executors that need a cluster: a folder each, with its options, its driver and its requirements for workers."""
