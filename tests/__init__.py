"""The tests. Layout: unit, property, wire, integration (real workers), standard (LangChain's suite), security, packaging."""
