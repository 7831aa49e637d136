"""From work items to launches: what a batch is, and its kernels."""
