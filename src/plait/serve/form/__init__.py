"""What clients send and get: the bodies of OpenAI's API."""
