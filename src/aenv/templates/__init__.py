"""Building templates out of base images by running sandboxes."""
