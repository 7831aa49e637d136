"""The HTTP door: a process that turns HTTP requests into calls on the road, and answers back."""
