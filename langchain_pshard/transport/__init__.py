"""ZeroMQ in one place: sockets in, messages out; and an in-memory link with the same face for tests."""
