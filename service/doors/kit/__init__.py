"""What all doors share: the link to the engine, its arena, problems, TLS."""
