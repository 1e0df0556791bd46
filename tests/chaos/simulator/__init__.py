"""A simulation in one process: real scheduler code on a real Postgres, in-memory Redis, model workers, virtual time.

plan.py      derives a plan from a seed: the number of actors, the actions of clients, and the faults with their times
world.py     the actors and their clock; runs a plan to its end
clients.py   clients that enqueue, start runs, cancel and retry
leaders.py   scheduler processes: standby, leading, crashed, or paused in the middle of a tick
person.py    sends the signals that flows wait for
workers.py   worker processes: the product's own reporter and table of held attempts around a model of the rest
memory.py    Redis as the leader and the workers see it, and the faults of its calls
postgres.py  a database with the simulated clock, which records every change of a task
checker.py   checks the result against the database and the log of executions only
flows.py     checks the runs of flows
shrink.py    finds a minimal list of faults that still fails
"""
