openapi.json
