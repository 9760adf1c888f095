"""What a run will cost, before it: predictions of time and memory from contracts, schedules and a catalog."""
