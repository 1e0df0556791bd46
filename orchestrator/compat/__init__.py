"""Other task queues: their APIs on this one, so that a program moves by its imports, and a bridge from their queues."""
