"""What a pipeline promises: which stage holds what, in which order a rank works, what is sent between stages."""
