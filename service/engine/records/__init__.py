"""Records: opaque blocks by key, in host memory and on disk."""
