"""The gRPC door: a process that turns the Open Inference Protocol's messages into calls on the
road."""
