"""What monitoring systems ask processes for: metrics, and whether they live and can work."""
