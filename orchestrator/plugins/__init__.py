"""Plugins that come with the package: each is an entry point, loaded where it is used, and nothing else imports it."""
