"""What the caches under serving engines share: calls of records whose failures are misses."""
