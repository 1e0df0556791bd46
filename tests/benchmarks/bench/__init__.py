"""Benchmarks of speed and memory, with a comparison to peers. `scripts/bench` runs them.

__main__      options, progress, output
rounds        one contestant's passes, in order
idle, steps   optional measurements that take longer
client        the process that enqueues and measures, in the contestant's environment; remote talks to it
services      Postgres and Redis, and an empty database for each pass
programs      other processes: start, stop, memory, CPU
environments  a virtual environment for each peer
report        medians, ratios, tables

Two packages belong to this one: `peers` has the contestants, `growth` the measurements of `--growth`.
"""
