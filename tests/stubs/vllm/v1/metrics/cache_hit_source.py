"""Where hits come from."""

from enum import Enum


class CacheHitSource(Enum):
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"
