"""All calls of a client, declared in one protocol for each subject, for two implementations.

    calls ── tasks  runs  workflows  code  schedules  queues  fleet  insights     the declarations
    backend    implements the calls on Postgres and Redis
    remote     implements the calls over HTTP; the API has a backend

`declaring.py` declares a call with its rules: the scope that an API key needs, the subject of the call, and whether it
may be retried. The request, the answer, the HTTP route and the remote method are made from the signature. The API
applies the rules (`api/client_checks.py`). Both implementations have the same methods to wait for ends.
"""
