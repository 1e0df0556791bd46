"""How fast it is, how much memory it takes, and how that compares with its peers. `scripts/bench` runs this.

__main__      options, progress, output
rounds        one contestant's passes, in order
idle, steps   measurements of ours that take longer, on request
client        the process that enqueues and measures, in the contestant's environment; remote talks to it
services      Postgres and Redis, and an empty database for each pass
programs      other processes: start, stop, memory, CPU
environments  a virtual environment for each peer
report        medians, ratios, tables

The packages beside this one: `peers` has the contestants, `growth` what `--growth` measures.
"""
