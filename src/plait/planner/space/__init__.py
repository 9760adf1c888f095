"""Which plans there are: what a user fixed, degrees that multiply to the devices, and what is chosen within them."""
