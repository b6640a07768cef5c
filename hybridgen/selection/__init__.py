"""Which host tokens are attended. One algorithm a file."""
