"""What a program can ask of the orchestrator, one protocol for each subject, whichever way it goes.

    calls ── tasks  runs  workflows  code  schedules  queues  fleet  insights     what can be asked
    backend    answers from Postgres and Redis
    remote     asks an API over HTTP, which has a backend

A call that is declared (`declaring.py`) says what a key must be good for and whether it may be made twice; from its
signature come the request, the answer, the route that serves it and the method that asks for it. What waits for an end
is the same on both ways to those who call it, and works differently behind it.
"""
