"""The kernel for latent pools (absorbed MLA) on Hopper."""
