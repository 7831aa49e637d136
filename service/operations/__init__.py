"""Every operation, declared once: its fields, its tensors, its rules, its answer."""
