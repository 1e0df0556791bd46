"""Commands for workflows as code."""
