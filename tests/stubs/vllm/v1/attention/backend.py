"""Named only."""


class AttentionMetadata:
    pass
