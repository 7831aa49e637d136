"""The kernel for any shape of K and V, on any device."""
