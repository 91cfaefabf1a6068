"""A KeyboardInterrupt, wherever it comes, leaves no lock of ours taken."""

from __future__ import annotations

import ast
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_helpers import until
from interrupt_helpers import free, interrupted_everywhere

from kvtransfer.books import TierPlan
from kvtransfer.commands import Ack, Scope
from kvtransfer.directory import Directory
from kvtransfer.integrations.hashed_pages import RecordPart, RecordPlan, Staging
from kvtransfer.jobs import Job
from kvtransfer.kernels.condition import Condition, Event
from kvtransfer.kernels.ending import Section
from kvtransfer.kernels.spec import KVSpec
from kvtransfer.mover import Mover
from kvtransfer.tiers.base import PageStatus
from kvtransfer.tiers.keys import Shard
from kvtransfer.tiers.ledger import PageLedger, claim_all

ROOT = Path(__file__).resolve().parents[1]
TOKENS = [1, 2, 3, 4]

Case = tuple[Callable[[], object], Callable[[], object]]  # some work, and what must be true whatever became of it


def kept() -> Directory:
    """With two pages of `TOKENS`, and what nobody has told of yet."""
    directory = Directory(2, [TierPlan("host", capacity_pages=8), TierPlan("disk", "keys", capacity_pages=8)])
    directory.store(TOKENS, range(2))
    for command in directory.commands():
        directory.acknowledge(Ack.of(command, PageStatus.OK))
    return directory


def works(directory: Directory) -> None:
    """Other threads get in, and are answered; verbs know that none is going on any more."""
    assert free(directory.index.mutex)
    assert directory._depth == 0
    assert directory.index.match(TOKENS, Scope().name(), use=False).pages == 2


VERBS: dict[str, Callable[[Directory], object]] = {
    "match": lambda directory: directory.match(TOKENS).release(),
    "store": lambda directory: directory.store([5, 6, 7, 8], range(2)),
    "commands": lambda directory: directory.commands(),
    "nested": lambda directory: directory.lost(memory=False),
    "tick": lambda directory: directory.tick(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_interrupted_lets_others_in(verb: str) -> None:
    def case() -> Case:
        directory = kept()
        return partial(VERBS[verb], directory), partial(works, directory)

    assert interrupted_everywhere(case) > 50


def test_a_job_that_ends_in_a_verb_that_is_interrupted_has_ended() -> None:
    """In this verb, or in the next one, whoever's that is."""

    def case() -> Case:
        directory, job = kept(), Job("store", 0, 1)
        directory._ended.append(job)

        def check() -> None:
            works(directory)
            directory.commands()
            assert job.done

        return directory.commands, check

    interrupted_everywhere(case)


def test_a_verb_is_what_it_was_written_as() -> None:
    assert list(inspect.signature(Directory.match).parameters) == ["self", "tokens", "scope", "device_pages"]
    assert (Directory.match.__doc__ or "").startswith("The longest prefix") and Directory.match.__name__ == "match"


def all_free(*locks: Any) -> None:
    assert all(map(free, locks))


def conditions() -> Case:
    condition = Condition()

    def work() -> None:
        with condition:
            condition.notify_all()

    return work, partial(all_free, condition)


def notifications() -> Case:
    """Who was told by an interrupted one, and sleeps again, does not take the next one's place in the queue."""
    condition, over = Condition(), list[int]()

    def sleep() -> None:
        with condition:
            while not over:
                condition.wait(4)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()

    def asleep() -> bool:
        with condition:
            return bool(condition._waiters)  # type: ignore[attr-defined]

    def work() -> None:
        with condition:
            condition.notify()

    def check() -> None:
        time.sleep(0.003)
        with condition:
            over.append(1)
            condition.notify()
        sleeper.join(2)
        assert not sleeper.is_alive()

    until(asleep, "it sleeps")
    return work, check


def events() -> Case:
    event = Event()

    def check() -> None:
        all_free(event._cond)
        event.set()
        assert event.wait(1)

    def work() -> None:
        event.set()
        event.wait()

    return work, check


def claims() -> Case:
    ledgers = [PageLedger(8, "page"), PageLedger(8, "slot")]
    ids, owner = np.arange(3), object()

    def work() -> None:
        claim_all([(ledger, ids) for ledger in ledgers], owner)
        for ledger in ledgers:
            ledger.release(owner)

    return work, lambda: all_free(*(ledger._changed for ledger in ledgers))


def sections() -> Case:
    section = Section()

    def check() -> None:
        section.left(5)
        assert not section._inside

    return partial(section.call, len, ()), check


def places() -> Case:
    spec = KVSpec.attention(num_layers=1, page_size=1, kv_heads=1, head_dim=8, itemsize=2)
    plan = RecordPlan(spec, (RecordPart(Shard.whole(spec), (0,)),), (spec.page_bytes,), direct=False)
    staging = Staging(plan, 3)

    def check() -> None:
        all_free(staging._freed)
        assert staging.lend(3, sorted) == [0, 1, 2]

    return partial(staging.lend, 2, len), check


def movers() -> Case:
    """The end of a mover, as far as its lock goes."""
    under = SimpleNamespace(refuse_more=list, wait_empty=lambda timeout_s: 0, close=list)
    thread = SimpleNamespace(shutdown=list, close=list)
    threads = dict.fromkeys(("_deadlines", "_reading", "_writing", "_sizing"), thread)
    mover: Any = SimpleNamespace(_under=under, _lower={}, _tiers=threading.RLock(), **threads)
    return partial(Mover.close, mover, timeout_s=1), partial(all_free, mover._tiers)


CASES = {
    "a condition": conditions,
    "notifications": notifications,
    "an event": events,
    "claims on two ledgers": claims,
    "a section": sections,
    "places of a staging area": places,
    "the end of a mover": movers,
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_interrupted_gives_its_locks_back(case: str) -> None:
    assert interrupted_everywhere(CASES[case]) > 5


def test_who_has_not_the_lock_is_told_so() -> None:
    """As Python's own says it, not by an endless recursion."""
    calls: list[Callable[[], object]] = [Condition().notify, Condition().notify_all, Condition().wait]
    for refused in calls:
        with pytest.raises(RuntimeError, match="un-acquired lock"):
            refused()


def test_the_means_of_these_tests_find_what_they_are_for() -> None:
    """Python's own Condition is what they are about, and a bare lock is safe."""

    def holding(lock: threading.Lock | threading.Condition) -> Case:
        def work() -> None:
            with lock:
                pass

        return work, partial(all_free, lock)

    assert interrupted_everywhere(lambda: holding(threading.Lock())) > 5
    with pytest.raises(AssertionError):
        interrupted_everywhere(lambda: holding(threading.Condition()))


# --- what the sources may not have


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    paths = [path for package in ("kernels", "tiers", "kvtransfer") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def last_name(node: ast.expr) -> str:
    """Of ``a.b.c`` the last one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_of_locks(trees: Iterable[ast.Module]) -> set[str]:
    """What locks and conditions are kept as, anywhere."""
    found = set[str]()
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = last_name(node.value.func) in ("Lock", "RLock", "Condition")
            found |= {last_name(target) for target in node.targets if made}
    return found


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Of a function, without those in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def faults(tree: ast.Module, locks: set[str]) -> Iterator[str]:
    """Ways to hold a lock of which an interrupt leaves it taken."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        for node in own_nodes(function):
            if isinstance(node, ast.With) and {last_name(item.context_expr) for item in node.items} & locks:
                if any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node)):
                    yield f"{function.name}: line {node.lineno}: a lock over a yield"
                if function.name == "__enter__" and any(isinstance(one, ast.AugAssign) for one in own_nodes(node)):
                    yield f"__enter__: line {node.lineno}: a count that __exit__ may not come to"
    tried = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owned = isinstance(node.func.value, ast.Attribute) and node.func.value.attr in locks
        if node.func.attr == "acquire" and owned and id(node) not in tried:
            yield f"line {node.lineno}: a lock is taken outside of the try that gives it back"
        if node.func.attr == "enter_context" and {last_name(argument) for argument in node.args} & locks:
            yield f"line {node.lineno}: a lock in an ExitStack"
        if isinstance(node.func.value, ast.Name) and (node.func.value.id, node.func.attr) == ("threading", "Condition"):
            yield f"line {node.lineno}: Python's own Condition; take kernels/condition.py's"


def test_no_lock_is_held_in_a_way_that_an_interrupt_breaks(sources: dict[str, ast.Module]) -> None:
    locks = names_of_locks(sources.values())
    assert {"_changed", "_lock", "mutex", "_tiers"} <= locks
    assert not [f"{path}: {fault}" for path, tree in sources.items() for fault in faults(tree, locks)]


BAD = """
def held(self):
    with self._lock:
        yield
class Counted:
    def __enter__(self):
        with self._lock:
            self.inside += 1
def close(self):
    if not self._lock.acquire(timeout=1):
        return
    with ExitStack() as held:
        held.enter_context(self._lock)
    self.news = threading.Condition()
"""


def test_what_the_sources_may_not_have_is_found() -> None:
    assert len(list(faults(ast.parse(BAD), {"_lock"}))) == 5


def test_who_is_interrupted_while_it_waits_has_the_lock_and_is_not_told_in_anothers_place() -> None:
    """Without the lock the end of its ``with`` would raise a RuntimeError, and hide the interrupt."""

    def case() -> Case:
        changed = Condition()

        def work() -> None:
            with changed:
                changed.wait(0.0001)

        def check() -> None:
            assert free(changed._mutex) and not changed._waiters  # type: ignore[attr-defined]

        return work, check

    assert interrupted_everywhere(case) > 30
