"""What a worker reports to the leader and logs."""
