"""A logger that can say a thing once."""

from __future__ import annotations

import logging
from typing import Any


class _VllmLogger(logging.Logger):
    def warning_once(self, msg: str, *args: Any) -> None:
        self.warning(msg, *args)

    def info_once(self, msg: str, *args: Any) -> None:
        self.info(msg, *args)


def init_logger(name: str) -> _VllmLogger:
    """The logger of a module."""
    made = _VllmLogger(name)
    made.parent = logging.getLogger()
    return made
