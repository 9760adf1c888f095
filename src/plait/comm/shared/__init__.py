"""Memory that the CPU ranks of one host share: what one of them writes, the others read in place."""
