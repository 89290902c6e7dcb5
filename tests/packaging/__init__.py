"""The distribution as users install it."""
