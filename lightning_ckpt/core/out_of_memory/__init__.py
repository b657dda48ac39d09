"""A step that ran out of memory, tried again as if it had not been run before."""
