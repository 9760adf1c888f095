"""An HTTP server with the OpenAI forms."""
