"""The `plait` command: data on stdout, everything else on stderr."""
