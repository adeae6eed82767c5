"""Recipes for tiny random models, one module a kind of model."""
