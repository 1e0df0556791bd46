"""Every call of a client, one protocol for each subject, for both implementations.

    calls ── tasks  runs  workflows  code  schedules  queues  fleet  insights     what can be asked
    backend    answers from Postgres and Redis
    remote     asks an API over HTTP, which has a backend

`declaring.py` declares a call with its rules: the scope that a key needs, what the call is about, and whether it may be
repeated. Its signature gives the request, the answer, the route that serves it and the method that asks for it. The API
applies the rules (`api/client_checks.py`). Waiting for an end has the same interface on both sides.
"""
