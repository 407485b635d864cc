"""Building templates out of base images by running machines through node/. For now: the built-in `base` (base.py)."""
