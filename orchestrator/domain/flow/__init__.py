"""Flow graphs: nodes and the actions that lead from one to the next, as data, and the plans of their runs."""
