"""Alembic migrations; shipped inside the wheel as `orchestrator/migrations`."""
