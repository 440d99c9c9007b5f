"""engine = "gpt-neox": unmodified trees of EleutherAI/gpt-neox."""
