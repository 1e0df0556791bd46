"""Orchestrator and nine other queues, measured by `scripts/bench --peers`.

contestants   the table: packages, processes and configuration of each
queue         the protocol that each module implements; imported in the queue's own environment
page          the tables and charts of README and docs/performance.md
"""
