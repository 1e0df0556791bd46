"""The schema. `all_tables.py` has all of it; a process that only reads and writes rows loads what it uses."""
