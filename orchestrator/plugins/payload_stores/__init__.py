"""Payload stores other than a folder."""
