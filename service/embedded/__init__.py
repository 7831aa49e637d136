"""An engine on a thread of its caller's process, with doors as child processes."""
