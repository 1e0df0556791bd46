"""Workers: take tasks from Redis, run them, report back. They need no database.

supervisor (parent)  forks and replaces the processes, beats for them, receives orders, notices deaths at once
  staffing           decides how many there are and who is replaced
  child              one process, as its parent sees it
  process (child)    consumer → pool (threads, event loop, child processes) → reporter
"""
