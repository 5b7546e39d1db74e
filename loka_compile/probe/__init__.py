"""Know where low precision is safe: statistics, sampling, error quantification."""
