"""Pages in the tiers below the pool: copied down before they are evicted, loaded when asked for."""
