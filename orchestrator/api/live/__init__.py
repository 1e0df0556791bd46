"""What happens, as it happens: server-sent events for one task, run or queue, and for the whole system.

    subjects   what can be listened to, and what is told of it
    listener   one who listens, with a cursor, which is the id of an event, and a buffer that has an end
    batches    many who want to know something are answered by one read
    reads      what a listener begins with, and what it has missed
    following  the thread that follows Redis, once for all
    hub        who listens to what
    answer     the stream, as HTTP has it

The leader writes what moved into a stream in Redis while somebody listens, and each process of the API follows that
stream once. A listener begins with a snapshot from Postgres, which is read after it has begun to listen, and gets
another one whenever something may have been missed. So it always ends in the true state.
"""
