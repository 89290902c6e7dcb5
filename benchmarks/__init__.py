"""Benchmarks: ratios measured in one run. `python dev.py bench list` names them."""
