"""Runs of any kind: begun, told, ended, cancelled."""
