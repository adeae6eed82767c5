"""The wire: what clients send and what they get, in OpenAI's shapes with this field's extras."""
