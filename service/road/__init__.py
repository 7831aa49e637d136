"""The road between callers and the engine: frames on a unix socket, images in shared memory."""
