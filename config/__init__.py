"""Settings of the service and of what watches it."""
