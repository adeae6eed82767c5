"""The types of request and response bodies: OpenAI's, with fields that similar servers add."""
