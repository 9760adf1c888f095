"""What is done to a whole block of a model: computing it again in backward, compiling it."""
