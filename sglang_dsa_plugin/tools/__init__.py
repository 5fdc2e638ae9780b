"""Command-line tools: one module a command, registered in cli.py. Heavy imports stay inside functions."""
