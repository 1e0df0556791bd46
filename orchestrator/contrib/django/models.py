"""A model without a table, for which the admin shows a link."""

from __future__ import annotations

from django.db import models


class Dashboard(models.Model):  # type: ignore[misc]  # Django has no types
    """The dashboard, where the admin lists models."""

    class Meta:
        """No table, and one permission: to see the link."""

        managed = False
        default_permissions = ("view",)
        verbose_name_plural = "Dashboard"
