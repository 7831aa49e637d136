"""The gateway: the Open Inference Protocol over HTTP and gRPC, in front of a service."""
