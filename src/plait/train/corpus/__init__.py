"""From the user's files to sequences of tokens in a shuffled, resumable order."""
