"""APIs of other task queues on this one, so that programs move by changing imports, and a bridge from their queues."""
