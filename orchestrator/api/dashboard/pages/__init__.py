"""The pages, by subject. Approvals and flows have their place in `navigation.py` when they come."""
