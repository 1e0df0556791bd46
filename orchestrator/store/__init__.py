"""All SQL lives here: one named function, one statement, beside its siblings."""
