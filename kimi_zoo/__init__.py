"""kimi-zoo."""
