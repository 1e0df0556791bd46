"""A soak test: a steady, long load of mixed tasks, a fault every few seconds, and metrics that must stay flat.

    load ──▶ Postgres, Redis, schedulers, workers ◀── faults, from a seed
                          │
              a sample of every metric each second
                          │
              a picture, a table of verdicts, JSON

The first scheduler and the first worker are veterans: no fault ends them, so that leaks have time to show. They are
paused for seconds like the others, and lose Postgres and Redis like them.

`scripts/soak` runs it; docs/reliability.md has the figures of the last long run.
"""
