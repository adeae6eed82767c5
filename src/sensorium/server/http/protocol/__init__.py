"""The bodies of requests and answers: OpenAI's shapes, with fields that similar servers add."""
