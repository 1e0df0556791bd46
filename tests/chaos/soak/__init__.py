"""A soak: a steady load of mixed tasks for long, a fault every few seconds, and lines that must stay flat.

    load ──▶ Postgres, Redis, schedulers, workers ◀── faults, from a seed
                          │
              a sample of every line each second
                          │
              a picture, a table of verdicts, JSON

Of the schedulers and of the workers the first is a veteran: no fault ends it, so that what leaks has time to show. It
is stopped for seconds like the others, and loses its Postgres and Redis like them.

`scripts/soak` runs it; docs/reliability.md has the figures of the last long run.
"""
