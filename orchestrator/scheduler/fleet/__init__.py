"""The fleet: which workers are live, which tasks they know, and which attempts were lost."""
