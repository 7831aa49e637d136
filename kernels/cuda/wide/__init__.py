"""The kernel for many query rows on Hopper."""
