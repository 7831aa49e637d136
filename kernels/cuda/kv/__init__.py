"""Where K and V lie: the pool's pages and ragged keys."""
