"""Workers: take tasks from Redis, run them, report back. They need no database.

supervisor (parent)  forks the processes, beats for them, receives orders, notices deaths at once
  process (child)    consumer → pool (threads, event loop, child processes) → reporter
"""
