"""Durable workflows as ordinary `async def` functions."""
