"""Tasks: what they are asked to be, what is reported of them, what follows."""
