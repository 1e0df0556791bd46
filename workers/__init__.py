"""Workers: take tasks from Redis, run them, report back. They need no database.

supervisor (parent)  forks and replaces the processes, sends heartbeats, receives orders, notices deaths at once
  staffing           decides how many processes there are and which are replaced
  child              one process, as its parent sees it
  process (child)    consumer → pool (threads, event loop, child processes) → reporter
"""
