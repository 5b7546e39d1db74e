"""explain(): what the backend did to a model, as text and JSON."""
