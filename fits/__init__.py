"""From step logs to fitted models."""
