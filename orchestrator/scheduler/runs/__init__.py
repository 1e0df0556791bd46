"""Runs of any kind: begin, notify, end and cancel them."""
