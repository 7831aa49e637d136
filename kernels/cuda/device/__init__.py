"""The device from the host: launches, streams, memory, tensors on their way in and out."""
