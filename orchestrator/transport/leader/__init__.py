"""The leader's side of Redis. streams.py reads and publishes in every tick; the other modules do the rest."""
