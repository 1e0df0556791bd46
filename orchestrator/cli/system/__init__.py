"""Commands for the system as a whole."""
