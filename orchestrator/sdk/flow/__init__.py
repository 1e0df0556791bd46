"""Flow graphs: reading, building, publishing and starting them."""
