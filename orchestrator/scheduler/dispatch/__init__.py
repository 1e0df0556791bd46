"""Hand ready tasks to the fleet."""
