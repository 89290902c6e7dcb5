"""What tests build on: tiny models, exported bundles, the leak check."""
