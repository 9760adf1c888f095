"""Files that configs come from and go to."""
