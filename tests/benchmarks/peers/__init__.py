"""Ours and nine other queues, measured alike by `scripts/bench --peers`.

contestants   the table: packages, processes and configuration of each
queue         the protocol that each module below implements; imported in the queue's own environment
page          the tables and charts of README and docs/performance.md
"""
