"""What a worker tells the leader, and people."""
