"""What a user's program works with: the application, its tasks, and handles to what it started."""
