"""The kernel for few query rows."""
