"""What computing and moving cost on this machine: measured once, and kept."""
