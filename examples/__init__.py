"""Programs to read and run: `python -m examples.NAME`."""
