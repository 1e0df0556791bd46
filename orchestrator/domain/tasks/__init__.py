"""Tasks: their options, the reports about them, and the decisions after each attempt."""
