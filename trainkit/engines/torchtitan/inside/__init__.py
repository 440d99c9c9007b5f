"""What runs in torchtitan's own interpreter: it has torch and torchtitan, and nothing of ours."""
