"""The schema. `all_tables.py` imports all tables; a process that only reads and writes rows loads only what it uses."""
