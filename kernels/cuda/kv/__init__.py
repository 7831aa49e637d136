"""Locations of K and V: the pool's pages, and ragged keys."""
