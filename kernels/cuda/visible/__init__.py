"""Which key tiles a custom mask leaves something of."""
