"""Records below the pool: opaque bytes by key, verified by digest, in host memory and on disk."""
