"""What workers of a Django project load: the application, once Django is set up."""

from __future__ import annotations

import django

from orchestrator.contrib.django import app

__all__ = ["app"]

django.setup()
