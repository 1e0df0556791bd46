"""Chaos on real processes: a load on real schedulers and workers, while a driver breaks everything around them.

plan.py       what a seed means: which faults strike when, for how long, and whom
faults/       what can go wrong, one context manager each: entering it strikes, leaving it heals
driver.py     plays a plan, in a thread
arena.py      Postgres and Redis, the schedulers and workers on them, and a wire between each process and each server
members.py    one scheduler, worker or API, started again whenever it ends, as a service manager would
standby.py    a copy of Postgres that follows it and takes its place
proxy.py      a wire that can be cut, held up and delayed
hosts.py      a network namespace: a machine of its own for a process, which can be partitioned
clocks.py     a wall clock of its own for a process, which can be set; clock.c is what the process loads
client.py     submits work meanwhile; loads/ has one function per kind of it
outsider.py   tells workflows as code what they wait for
visitor.py    enqueues over HTTP, and asks again until it is acknowledged
clockwork.py  sets schedules, and pauses them in the end
project/      the application: tasks that write down what they do, outside of the system
journal.py    what was written down: executions, enqueues that committed, and who could not be heard when
checks/       what must be true in the end, from the database, Redis, the process table and the journal alone
run.py        one experiment from beginning to end
"""
