"""Flow graphs of an application: read, built, published, started and steered."""
