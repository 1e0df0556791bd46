"""The name by which jobs in RQ ask for their prints to be kept: it is in their queues, and must stay."""

from pkgutil import resolve_name

call = resolve_name("orchestrator.plugins.executors.rq.prints:call")
