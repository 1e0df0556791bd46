"""The pages of the dashboard, by subject."""
