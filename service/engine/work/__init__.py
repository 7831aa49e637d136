"""What handlers leave to do, and the requests that they get: the lowest layer of the engine."""
