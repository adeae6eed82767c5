"""Runs Sensorium on several replicas of an engine, on one machine or many."""
