"""Steps that follow their caller layer by layer, on a device."""
