"""Where bytes live, and whether they fit: decided before anything is allocated."""
