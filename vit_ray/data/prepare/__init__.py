"""From images in their usual formats to a checked, deduplicated data set."""
