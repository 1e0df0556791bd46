"""Everything that touches Redis. The key layout is in `keys`."""
