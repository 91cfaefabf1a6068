"""Stand-in."""


class SWAKVPool:
    pass
