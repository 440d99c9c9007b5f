"""Files from the web, the Hugging Face hub and object stores, in ranges, with retries."""
