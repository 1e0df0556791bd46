"""The APIs of other task queues on this one: a program moves by changing its imports."""
