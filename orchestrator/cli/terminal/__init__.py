"""What commands share: options, ids, times, tables, JSON."""
