"""Reports to the leader, progress and logs."""
