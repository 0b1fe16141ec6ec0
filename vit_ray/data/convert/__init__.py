"""Makes data sets of images: the formats of sources, conversion, verification, de-duplication."""
