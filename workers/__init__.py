"""pshard-worker: serves one or more stages of a bundle."""
