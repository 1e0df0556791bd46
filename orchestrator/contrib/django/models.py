"""A model without a table: the admin's link to the dashboard."""

from __future__ import annotations

from django.db import models


class Dashboard(models.Model):  # type: ignore[misc]  # Django has no types
    """The dashboard, as a model in the admin."""

    class Meta:
        """No table, and only the permission to view the link."""

        managed = False
        default_permissions = ("view",)
        verbose_name_plural = "Dashboard"
