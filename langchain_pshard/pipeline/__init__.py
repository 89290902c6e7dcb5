"""Drives a pipeline of workers; knows nothing of LangChain."""
