"""The scheduler: applies the reports of workers, and decides what happens next. One scheduler leads."""
