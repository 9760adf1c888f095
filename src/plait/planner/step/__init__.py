"""What one optimizer step costs: blocks from the contract, overlap from the schedules, pipeline, data parallel."""
