"""What all doors share: authentication, the link to the engine, its arena, problems, TLS."""
