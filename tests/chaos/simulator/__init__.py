"""A world in one process: real scheduler code on a real Postgres, an in-memory Redis, model workers, virtual time.

plan.py      what a seed means: the size of the world, what clients do, which faults happen when
world.py     the actors and their clock; runs a plan to its end
clients.py   enqueue, start runs, cancel and retry
leaders.py   scheduler processes: standby, leader, crashed, paused in the middle of a tick
person.py    sends flows what they wait for
workers.py   worker processes: the product's own reporter and table of held attempts around a model of the rest
memory.py    Redis as the leader and the workers see it, and what can go wrong with a call
postgres.py  a database whose clock is the world's and whose every change of a task is written down
checker.py   what must be true in the end, from the database and the log of executions alone
flows.py     what must be true of runs of flows
shrink.py    the smallest list of faults that still fails
"""
