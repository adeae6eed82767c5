"""What is asked and answered: one module a task."""
