"""One task in a process of its own, as the command of a container: `orchestrator run-task`."""
