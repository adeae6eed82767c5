"""Recipes for real models from package registries, one module a model."""
