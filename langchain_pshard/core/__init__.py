"""The shared core: messages, bundle, sampling and errors; standard library, numpy and msgspec only."""
