"""The kernel for many query rows on any device from sm_80."""
