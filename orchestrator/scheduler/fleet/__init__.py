"""The fleet: which workers live, what they know, what was lost."""
