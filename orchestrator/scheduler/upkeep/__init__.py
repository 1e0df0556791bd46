"""Keep the tables small and clean."""
