"""Alias of the function that RQ jobs call to keep their prints. Queued jobs contain this name, so it must stay."""

from pkgutil import resolve_name

call = resolve_name("orchestrator.plugins.executors.rq.prints:call")
