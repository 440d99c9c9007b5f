"""From crawled text to training text: steps over documents, and duplicates among all of them."""
