"""What a run does about ranks that die, hang or are slow."""
