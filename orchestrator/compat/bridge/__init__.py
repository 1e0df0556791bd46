"""A bridge drains a live queue of Celery or RQ into ours, while producers still use the old client.

A message is at each moment in one place, and each step between two places is atomic in the Redis of the old queue:

    old list ──take──> taken ──confirm──> open ──settle──> gone; the result is written back
        ^                └──confirm──> aside│ (cannot be read, or no such task)
        └───────────────give────────┴───────┘ (`--back`: the leader has withdrawn its task, which no worker was given)

`take` gives the message the id of its task. The tasks are created between `take` and `confirm`; a bridge that dies
there leaves its list to the next one, which finds those ids in Postgres. So a message becomes one task, however often
that is tried, and by however many bridges.
"""
