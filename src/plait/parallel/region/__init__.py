"""Parallel linears as passes over rows: what a range of rows is, what runs them, and what autograd is told."""
