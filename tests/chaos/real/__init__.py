"""Chaos on real processes: schedulers and workers under load, while a driver injects faults around them.

plan.py       derives a plan from a seed: faults with their times, durations and targets
faults/       the faults, one context manager each: entering injects the fault, leaving heals it
driver.py     executes a plan in a thread
arena.py      Postgres, Redis, schedulers and workers, with a proxy between each process and each server
members.py    one scheduler, worker or API process, restarted whenever it ends, as by a service manager
standby.py    a standby of Postgres that can be promoted
proxy.py      a TCP proxy that can be cut, blocked and delayed
hosts.py      a network namespace for a process, like a separate machine, which can be partitioned
clocks.py     a separate wall clock for a process; clock.c is the preloaded library
client.py     submits work meanwhile; loads/ has one function per kind of work
outsider.py   sends signals, updates and promises to code workflows
visitor.py    enqueues over HTTP, and retries until the API acknowledges
clockwork.py  creates schedules, and pauses them in the end
project/      the application, whose tasks record their executions outside the system
journal.py    the record: executions, committed enqueues, and periods in which a worker could not be heard
checks/       what must be true in the end, judged by the database, Redis, the process table and the journal only
run.py        one experiment from beginning to end
"""
