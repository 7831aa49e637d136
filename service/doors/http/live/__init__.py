"""The live page: pool, tree and load of the service as they are, for a browser."""
