"""Named only."""


class ForwardContext:
    pass
