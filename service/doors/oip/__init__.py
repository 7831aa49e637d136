"""The Open Inference Protocol v2, as its HTTP and its gRPC door share it: every operation a model,
requests to images and images to answers."""
