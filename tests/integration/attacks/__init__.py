"""One test for each attack that slowed down or failed other clients' requests in version 0.1."""
