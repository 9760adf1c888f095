"""The HTTP side: paths, keys, streams, and the thread that runs them."""
