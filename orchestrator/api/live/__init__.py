"""What happens, as it happens: server-sent events for one task, run or queue, and for the whole system.

    subjects   tasks, runs, queues and the system, and their events
    listener   one listener: its cursor, which is the id of an event, and its bounded buffer
    reads      snapshots, and what listeners have missed: one read for many questions
    following  the thread that follows Redis, once for all listeners; and why nothing moves, if nothing does
    hub        all listeners, by subject
    answer     the stream over HTTP

The leader writes what moved into a stream in Redis while there are listeners, and each process of the API follows that
stream once. A listener begins with a snapshot from Postgres, which is read after it has begun to listen, and gets
another one whenever something may have been missed. So it always ends in the true state.
"""
