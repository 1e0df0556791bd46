"""How fast it is, how much memory it takes, and how that compares with its peers. `scripts/bench` runs this.

__main__      options, progress, output
rounds        one contestant's passes, in order
idle, million, finished
              measurements of ours that take longer, on request
contestants   who takes part, and which processes each needs
queues/       one module per contestant, all with the interface of queues/base; imported in its own environment
client        the process that enqueues and measures, in the contestant's environment; remote talks to it
services      Postgres and Redis, and an empty database for each pass
programs      other processes: start, stop, memory, CPU
environments  a virtual environment for each peer
report        medians, ratios, tables
"""
