"""A bridge drains live Celery queues while producers still use Celery's client.

A message is in one place at any time, and each step between two places is atomic in the Redis of the Celery queue:

    old list ──take──> taken ──confirm──> open ──settle──> gone; the result is written back
        ^                └──confirm──> aside│ (not readable, or no such task)
        └───────────────give────────┴───────┘ (`--back`: the leader cancelled its task, which no worker had received)

`take` assigns the id of the future task. The tasks are created between `take` and `confirm`. If a bridge dies there,
the next bridge processes its list, and finds the ids in Postgres. So a message becomes exactly one task, however often
and by however many bridges it is processed.
"""
