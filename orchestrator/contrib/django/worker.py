"""The module that workers of a Django project load: it sets up Django, and has the application."""

from __future__ import annotations

import django

from orchestrator.contrib.django import app

__all__ = ["app"]

django.setup()
