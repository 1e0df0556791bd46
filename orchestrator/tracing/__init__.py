"""OpenTelemetry spans. Nothing is imported from OpenTelemetry, and nothing costs time, unless spans are wanted."""
