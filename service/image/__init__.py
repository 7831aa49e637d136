"""Images: the safetensors form of every call and every answer, and JSON bodies made into them."""
