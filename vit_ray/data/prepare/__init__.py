"""From images as people keep them to a checked, deduplicated data set."""
