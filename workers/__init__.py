"""Workers take tasks from Redis, run them and report back. They need no database.

supervisor (parent)  forks and replaces the processes, sends heartbeats, receives orders, notices deaths at once
  scaling            decides how many processes there are
  child              one process, as its parent sees it
  process (child)    receiver → pool (threads, event loop, child processes) → reporter
"""
