"""The leader's side of Redis: streams.py is the tick's way in and out; the rest is beside it."""
