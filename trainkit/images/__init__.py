"""Container images: what goes into one, what builds it, and image files made of it."""
