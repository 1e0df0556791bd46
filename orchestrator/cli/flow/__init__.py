"""Commands about flow graphs."""
