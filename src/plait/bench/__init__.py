"""How fast it is here, against the limit: measurements in interleaved rounds, traces and timelines."""
