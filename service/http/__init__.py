"""The service as HTTP: reading requests, building operations, telling answers."""
