"""Live events: server-sent events for one task, run or queue, and for the whole system.

    subjects   tasks, runs, queues and the system, and their events
    listener   one listener: its cursor, which is the id of an event, and its bounded buffer
    reads      snapshots, and the events that listeners missed: one read answers many listeners
    following  the thread that follows Redis for all listeners, and the search for outages
    hub        all listeners, by subject
    answer     the stream over HTTP

While there are listeners, the leader writes state changes to a stream in Redis. Each API process follows that stream
once. A listener subscribes first and then reads a snapshot from Postgres. Whenever it may have missed something, it
reads another snapshot. So its last event always shows the true state.
"""
