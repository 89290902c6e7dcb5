"""Complete programs that show PShard at work."""
