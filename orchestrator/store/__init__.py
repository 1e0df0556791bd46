"""All SQL of the project: named functions, most of them a single statement."""
