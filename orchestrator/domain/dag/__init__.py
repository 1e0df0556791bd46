"""DAG workflows: definitions, expressions, and the plan of a run."""
