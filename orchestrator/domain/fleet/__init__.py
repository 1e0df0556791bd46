"""What is handed to the fleet, and by which names."""
