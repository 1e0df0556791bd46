"""Runs of any kind: begun, notified, ended, cancelled."""
