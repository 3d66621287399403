"""The engine behind HTTP: bodies in, events out."""
