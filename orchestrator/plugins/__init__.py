"""Plugins that come with the package. Each is an entry point, loaded on use, and imported by nothing else."""
