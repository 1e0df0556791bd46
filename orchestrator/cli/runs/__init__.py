"""Commands for runs, and how runs are drawn."""
