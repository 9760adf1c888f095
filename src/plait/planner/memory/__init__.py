"""What a plan needs on its worst rank."""
