"""The ZeroMQ door: a process that publishes the cache's events as vLLM publishes its own."""
