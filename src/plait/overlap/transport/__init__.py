"""Ways in which pieces travel. Each module is one; `base` is what they have in common."""
