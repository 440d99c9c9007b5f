"""Documents out of files: formats, decompression, filters, what is rejected."""
