"""The dashboard link in Django's admin, if `ORCHESTRATOR["dashboard"]` is its URL."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.shortcuts import redirect

from orchestrator.contrib.django import option
from orchestrator.contrib.django.models import Dashboard


class DashboardAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    """A model list that redirects to the dashboard."""

    def has_add_permission(self, *_: Any) -> bool:
        """Forbid changes: there is only the link."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def changelist_view(self, *_: Any, **__: Any) -> Any:
        return redirect(option("dashboard"))


if option("dashboard"):
    admin.site.register(Dashboard, DashboardAdmin)
