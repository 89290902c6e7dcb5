"""What must be impossible, checked on the source and on the wire."""
