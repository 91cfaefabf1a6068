"""Named only."""


class BackpressureDetector:
    """Decides whether a tier is too slow to be given more."""
