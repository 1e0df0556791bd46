"""OpenTelemetry, where there is some: nothing of it is imported, and nothing costs, while nobody wants spans."""
