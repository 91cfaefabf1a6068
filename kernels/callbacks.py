"""Callbacks of handles: calling other people's functions, and waking the coroutine that awaits a handle."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable


def call_subscriber(fn: Callable[[], object]) -> None:
    """Call a subscriber. Its bug is reported as an uncaught one in a thread is, and others are served all the same. A
    KeyboardInterrupt on the main thread is no bug of the subscriber's: it is the user's, and goes on."""
    try:
        fn()
    except BaseException as error:  # not hidden: the hook prints it, or does what the program set it to
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def future_and_waker() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running loop, and what ends it from any thread; called again, or after the loop was closed, that
    does nothing."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(end)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has nobody left who waits
                raise

    return future, wake
