"""From documents to token ids: encoders, and the workers of each shard."""
