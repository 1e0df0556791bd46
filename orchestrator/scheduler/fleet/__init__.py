"""The fleet: who lives, who knows what, what was lost."""
