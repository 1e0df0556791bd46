"""Flow graphs in Postgres: their versions, their runs, and the visits to their nodes."""
