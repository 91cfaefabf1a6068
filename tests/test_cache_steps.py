"""The cache under random steps, against brute-force models: hits equal those of an exact LRU; with lower tiers, faults,
damage, cancels and stalls every byte that a load calls OK is the right one, and nothing is left held at the end."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_helpers import MEMORY, Form, Rig, disk
from engine_helpers import LIMIT_S, Bytes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from lru_model import ExactLru

from kvtransfer.commands import Scope
from kvtransfer.tiers.base import PageStatus

QUICK = settings(max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=500, stateful_step_count=50)
TRUNK = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0]
BRANCHES = (TRUNK, TRUNK[:16] + [7] * 8, TRUNK[:9] + [5] * 15, TRUNK[:3] + [3] * 21, [4] * 24)
tokens_of = st.builds(
    lambda branch, n: list(BRANCHES[branch][:n]),
    st.sampled_from([0, 0, 1, 2, 3, 4]),
    st.sampled_from([24, 24, 17, 12, 9, 5, 2]),
)


class Steps(RuleBasedStateMachine):
    """What both machines share: a rig, and what each page must hold."""

    form: Form = "one process"
    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def start(self, **more: Any) -> None:
        self.rig = Rig(self.form, Path(self.folder.name), pages=96, **more)
        self.scopes = (self.rig.recipe.space, Scope(bytes(32), b"another"))

    def content(self, tokens: list[int], scope: int) -> Bytes:
        """The bytes of each page of a sequence: they follow from the tokens up to its end, and the scope."""
        size, rows = self.rig.page_size, []
        for stop in range(size, len(tokens) + 1, size):
            seed = hashlib.sha256(repr((tokens[:stop], scope)).encode()).digest()
            rows.append(np.random.default_rng(list(seed)).integers(0, 256, self.rig.spec.page_bytes, dtype=np.uint8))
        return np.stack(rows) if rows else np.empty((0, self.rig.spec.page_bytes), np.uint8)

    def fill(self, tokens: list[int], scope: int) -> list[int]:
        """Device pages that hold what a forward over ``tokens`` would have written."""
        rows = self.content(tokens, scope)
        pages = self.rig.take(len(rows))
        self.rig.put(pages, rows)
        return pages

    def teardown(self) -> None:
        with self.folder:
            if hasattr(self, "rig"):
                try:
                    self.end()
                finally:
                    self.rig.close()

    def end(self) -> None:
        self.rig.check()


class ExactSteps(Steps):
    """Without faults, one request at a time."""

    @initialize(slots=st.sampled_from([3, 5, 8, 14, 40]))
    def begin(self, slots: int) -> None:
        self.start(slots=slots)
        self.model = ExactLru(self.rig.page_size, slots)
        self.everything = ExactLru(self.rig.page_size, None)

    @rule(tokens=tokens_of, layerwise=st.booleans())
    def serve(self, tokens: list[int], layerwise: bool) -> None:
        rig = self.rig
        ids = np.array(tokens, dtype=np.int32)
        hits, most = self.model.serve(ids), self.everything.serve(ids)
        with rig.cache.match(tokens) as hit:
            assert hit.pages == hits <= most, f"the model has {hits} pages, the cache {hit.pages}"
            assert sum(hit.tokens_by_tier.values()) == hit.tokens
            load = rig.cache.load(hit, pages := rig.take(hit.pages), layerwise=layerwise)
        load.result(LIMIT_S).require()
        assert load.verdict(LIMIT_S).verified
        assert np.array_equal(rig.read(pages), self.content(tokens, 0)[:hits])
        rig.give(pages)
        pages = self.fill(tokens, 0)
        store = rig.cache.store(tokens, pages)
        store.result(LIMIT_S)
        rig.settle()
        rig.give(pages)
        assert rig.directory.figures().tiers["host"].present_pages == self.model.pages


class FaultySteps(Steps):
    """With all that can go wrong."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        write = st.sampled_from(["write_through", "write_through", "write_back", "write_through_selective"])
        lower: dict[str, Any] = {"far": MEMORY}
        if data.draw(st.booleans()):
            lower = {"disk": disk(Path(self.folder.name), data.draw(st.sampled_from([6, 40]))), **lower}
        self.start(
            slots=data.draw(st.sampled_from([4, 9, 30])),
            lower=lower,
            plans={name: {"write": data.draw(write)} for name in lower},
            host_plan={
                "write": data.draw(st.sampled_from(["write_through", "write_through", "write_back"])),
                "most_pages": 40,
            },
            mover={"deadline_s": 0.15},
            host={"most_pages": 40},
            directory={"window": 2},
        )
        self.names = tuple(lower)
        self.loads: list[tuple[Any, list[int], int]] = []
        self.stores: list[Any] = []
        self.hits: list[Any] = []
        self.fetches: list[Any] = []

    @rule(tokens=tokens_of, scope=st.sampled_from([0, 0, 1]), layerwise=st.booleans(), keep=st.booleans())
    def load(self, tokens: list[int], scope: int, layerwise: bool, keep: bool) -> None:
        self.make_room()
        hit = self.rig.cache.match(tokens, self.scopes[scope])
        assert sum(hit.tokens_by_tier.values()) == hit.tokens <= len(tokens)
        load = self.rig.cache.load(hit, self.rig.take(hit.pages), layerwise=layerwise)
        self.loads.append((load, tokens, scope))
        if keep:
            self.hits.append(hit)
        else:
            hit.release()

    @rule(tokens=tokens_of, scope=st.sampled_from([0, 0, 1]), leaving=st.booleans())
    def store(self, tokens: list[int], scope: int, leaving: bool) -> None:
        self.make_room()
        pages = self.fill(tokens, scope)
        self.stores.append(self.rig.cache.store(tokens, pages, self.scopes[scope], leaving=leaving))

    @rule(tokens=tokens_of, scope=st.sampled_from([0, 0, 1]), warm=st.booleans())
    def prefetch(self, tokens: list[int], scope: int, warm: bool) -> None:
        if warm:
            self.rig.cache.warm(tokens, self.scopes[scope])
        else:
            self.fetches.append(self.rig.cache.prefetch(tokens, self.scopes[scope]))

    def make_room(self) -> None:
        """Device pages for one request. (What is drawn must not depend on how quick things are.)"""
        if len(self.rig.free) < 24:
            self.settle()

    @rule(which=st.integers(0, 1000))
    def stop(self, which: int) -> None:
        """Something that is under way is given up."""
        if self.fetches:
            self.rig.cache.stop(self.fetches.pop(which % len(self.fetches)))
        if self.hits:
            self.hits.pop(which % len(self.hits)).release()
        running = [*self.stores, *(load for load, _, _ in self.loads)]
        if running:
            running[which % len(running)].cancel()

    @rule()
    def collect(self) -> None:
        """Look at what is done, and give its device pages to others."""
        for load, tokens, scope in [one for one in self.loads if one[0].done()]:
            good = [at for at, status in enumerate(load.statuses) if status is PageStatus.OK]
            rows = self.rig.read(load.page_ids[good])
            assert np.array_equal(rows, self.content(tokens, scope)[good]), "a wrong byte was published"
            self.rig.give(load.page_ids.tolist())
        self.loads = [one for one in self.loads if not self._given(one[0])]
        for store in [store for store in self.stores if store.done()]:
            self.rig.give(store.page_ids.tolist())
        self.stores = [store for store in self.stores if not self._given(store)]

    def _given(self, handle: Any) -> bool:
        return not handle.page_ids.size or int(handle.page_ids[0]) in self.rig.free

    @rule(
        data=st.data(),
        kind=st.sampled_from(["error", "wrong_bytes", "short", "partial", "stall", "delay"]),
        verb=st.sampled_from(["get", "put", "lookup", "remove", None]),
        silent=st.booleans(),
        hold=st.booleans(),
    )
    def fault(self, data: st.DataObject, kind: str, verb: Any, silent: bool, hold: bool) -> None:
        name = data.draw(st.sampled_from(self.names))
        seconds = 0.01 if kind == "delay" else 60.0
        self.rig.do("fault", name, kind, verb, pages=[0, 2], silent=silent, hold=hold, seconds=seconds, count=1)

    @rule(lane=st.sampled_from(["copy_in", "copy_out"]))
    def hold(self, lane: str) -> None:
        self.rig.do("hold", lane)

    @rule()
    def let_go(self) -> None:
        self.rig.do("let_go")
        for name in self.names:
            self.rig.do("release", name)

    @rule()
    def damage(self) -> None:
        self.rig.settle_all()
        self.rig.do("spoil_slots")

    @rule(tier=st.sampled_from(["host", "disk", "far"]), pages=st.sampled_from([1, 3, 100]))
    def evict(self, tier: str, pages: int) -> None:
        if tier in ("host", *self.names):
            self.rig.cache.evict(tier, pages)

    @rule(pages=st.sampled_from([3, 9, 40]))
    def resize(self, pages: int) -> None:
        self.rig.cache.resize_host(pages)

    @rule()
    def come_and_go(self) -> None:
        """One more tier; what is under way there ends first, so that it lets go of the host's memory."""
        if "more" in self.rig.cache.stats().tiers:
            self.rig.settle_all()
            self.rig.cache.detach("more")
        else:
            self.rig.cache.attach("more", MEMORY, write="write_back")

    @rule(tokens=tokens_of)
    def pin(self, tokens: list[int]) -> None:
        self.rig.cache.pin(tokens, ttl_s=0.01)

    @rule()
    def settle(self) -> None:
        self.rig.settle_all()
        self.collect()
        assert not self.loads and not self.stores
        self.rig.check_books()

    def end(self) -> None:
        self.settle()
        for hit in self.hits:
            hit.release()
        for fetch in self.fetches:
            self.rig.cache.stop(fetch)
        self.rig.end_pins()
        self.rig.settle_all()
        self.rig.check()


class FaultyStepsOfTwo(FaultySteps):
    form: Form = "two processes"


TestExactSteps = ExactSteps.TestCase
TestExactSteps.settings = QUICK
TestFaultySteps = FaultySteps.TestCase
TestFaultySteps.settings = QUICK
TestFaultyStepsOfTwo = FaultyStepsOfTwo.TestCase
TestFaultyStepsOfTwo.settings = settings(QUICK, max_examples=5)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [ExactSteps, FaultySteps], ids=["exact", "faulty"])
def test_fifty_thousand_steps(machine: type[RuleBasedStateMachine]) -> None:
    """25,000 of each."""
    run_state_machine_as_test(machine, settings=LONG)
