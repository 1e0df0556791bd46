"""`python -m orchestrator` is the same as `orchestrator`."""

from orchestrator.cli import main

main(prog_name="orchestrator")
