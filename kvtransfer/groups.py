"""groups: which layers of a layer-wise load travel together. Pure functions.

A large group has large pieces and few submissions; a small first group lets the forward begin early, a small last
one leaves little to compute after the last byte. `best_groups` follows each pattern beside a forward and takes the one
that is through first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

MAX_GROUP_LAYERS = 4  # 1,2,3,4,4,..,4,3,2,1 was the best of six patterns in a forward (H200, pages of 16)
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

LAUNCHED = 0.75  # of an eager layer's launches, what the GPU takes for it at most (8B-shaped, 64 new tokens, H200)

Groups = tuple[tuple[int, int], ...]
WORTH = 0.002  # of the whole, that one more group must gain: a slower CPU writes fewer descriptors in time


class GroupTimes(NamedTuple):
    """Seconds of one layer group.

    submit  of the CPU, which works ahead of the link
    copy    on the link
    last    on the link, of the part that is submitted last: nothing of it can have been copied before
    lag     from the copy's end until its layers can be used
    delay   of a thread that launches a forward meanwhile: it wants the driver's lock as well
    """

    submit: float
    copy: float
    last: float
    lag: float
    delay: float = 0.0


GroupSeconds = Callable[[int, bool], GroupTimes]
"""(bytes of a group a page, whether it is the first group) -> its times."""


def layer_groups(
    num_layers: int, most: int = MAX_GROUP_LAYERS, *, up: bool = True, down: bool = True
) -> list[tuple[int, int]]:
    """(start, stop) of groups of at most ``most`` layers: growing from one (``up``), at last shrinking (``down``)."""
    ramp = list(range(1, most))
    while (up + down) * sum(ramp) > num_layers:
        ramp.pop()
    return _cut(num_layers, most, ramp if up else [], ramp[::-1] if down else [])


def _cut(num_layers: int, most: int, up: list[int], down: list[int]) -> list[tuple[int, int]]:
    """Groups of sizes ``up``, then of ``most`` layers, then ``down``."""
    middle = num_layers - sum(up) - sum(down)
    rest = [middle % most] if middle % most else []
    stops = np.cumsum([*up, *[most] * (middle // most), *rest, *down]).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


@lru_cache(maxsize=64)
def patterns(num_layers: int) -> tuple[Groups, ...]:
    """What `best_groups` tries: even groups, and ramps that grow by one layer or double, up, down and both, of several
    sizes; fewest groups first."""
    found: dict[Groups, None] = {}
    for most in (*(n for n in _SIZES if n < num_layers), num_layers):
        for up, down in product((False, True), repeat=2):
            found[tuple(layer_groups(num_layers, most, up=up, down=down))] = None
        doubled = [1 << i for i in range(most.bit_length()) if 1 << i < most]
        for first in ([], list(range(1, most)), doubled):
            for last in ([], doubled[::-1]):
                if sum(first) + sum(last) <= num_layers:
                    found[tuple(_cut(num_layers, most, first, last))] = None
    return tuple(sorted(found, key=len))


class Beside(NamedTuple):
    """A forward: seconds of a layer, and whether it is its launches that take so long. Only then does what delays the
    thread that launches delay the forward: otherwise that thread is far ahead. Where it is the launches, they go on
    while layers are awaited, and once a layer is there the GPU needs `LAUNCHED` of its time for it."""

    layer_s: float
    launches: bool = False


def layers_done(groups: Groups, ends: Sequence[int], group_s: GroupSeconds, beside: Beside) -> tuple[float, float]:
    """(when the last layer has arrived, when the forward is through), in seconds.

    ``ends`` are the bytes of a page up to the end of each layer, beginning with 0.
    """
    cpu = lane = arrived = launched = done = 0.0
    for start, stop in groups:
        times = group_s(ends[stop] - ends[start], start == 0)
        cpu += times.submit
        lane = max(lane + times.copy, cpu + times.last)
        arrived = lane + times.lag
        computing = (stop - start) * beside.layer_s
        if beside.launches:
            launched = max(launched, cpu) + computing + times.delay
            done = max(max(done, arrived) + LAUNCHED * computing, launched)
        else:
            done = max(done, arrived) + computing
    return arrived, done


def best_groups(ends: Sequence[int], group_s: GroupSeconds, forwards: Sequence[Beside], slot_bytes: int) -> Groups:
    """The pattern beside which a forward is through first, where each group has to be `WORTH` it.

    ``forwards`` are what it may be. With several, the pattern is taken whose worst loss against the best of each is
    smallest. Groups whose layers of one page do not fit a ring slot are left out (they would be cut
    again), except single layers.
    """
    seconds = cache(group_s)

    fitting = [
        p
        for p in patterns(len(ends) - 1)
        if all(stop - start == 1 or ends[stop] - ends[start] <= slot_bytes for start, stop in p)
    ]
    losses = [1.0] * len(fitting)
    for beside in forwards:
        times = [layers_done(p, ends, seconds, beside)[1] for p in fitting]
        best = min(times)
        losses = [max(loss, t / best) for loss, t in zip(losses, times, strict=True)]
    return min(zip(fitting, losses, strict=True), key=lambda found: found[1] + WORTH * len(found[0]))[0]
