"""Stages of a pipeline on torch.distributed.pipelining: its schedules run them, what they send is recorded."""
