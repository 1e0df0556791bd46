"""The conformance suite of payload stores: pytest tests to run against your own store.

class TestMine(PayloadStoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MyStore("mine://…")  # an empty one
"""

from __future__ import annotations

import os

import msgspec
import pytest

from orchestrator.payloads.collector import Collector
from orchestrator.payloads.keeping import PayloadStore
from orchestrator.payloads.objects import Gone
from orchestrator.payloads.stores import SHARDS, Absent, Store
from orchestrator.references import RESULT, ObjectName, Reference, whole_reference


def name_of(owner: bytes | None = None, attempt: int = 1) -> ObjectName:
    """Return the name of a result of a task; by default of a new task."""
    owner = owner or os.urandom(16)
    return ObjectName(owner, owner, attempt, RESULT, os.urandom(16))


def put(store: Store, name: ObjectName, *parts: bytes) -> None:
    sink = store.create(name)
    for part in parts:
        sink.write(part)
    sink.commit()


def everything(store: Store) -> set[ObjectName]:
    return {found.name for shard in SHARDS for found in store.listed(shard)}


class PayloadStoreConformance:
    """The tests. Subclass with a name that begins with `Test`, and define a fixture `store`."""

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `store`, which returns an empty store")

    def test_an_object_is_read_as_it_was_written(self, store: Store) -> None:
        name = name_of()
        put(store, name, b"first ", b"x" * 1_000_000, b" last")
        with store.open(name) as file:
            assert file.read(9) == b"first xxx"
            file.seek(-5, os.SEEK_END)
            assert file.read() == b" last"

    def test_an_object_appears_when_it_is_complete(self, store: Store) -> None:
        name = name_of()
        sink = store.create(name)
        sink.write(b"half")
        assert everything(store) == set()
        with pytest.raises(Absent):
            store.open(name).read()
        sink.commit()
        assert everything(store) == {name}

    def test_an_object_that_is_abandoned_leaves_nothing(self, store: Store) -> None:
        name = name_of()
        sink = store.create(name)
        sink.write(b"x" * 1_000_000)
        sink.abandon()
        assert everything(store) == set()
        with pytest.raises(Absent):
            store.open(name).read()

    def test_objects_are_listed_in_their_part_with_their_age(self, store: Store) -> None:
        names = {name_of() for _ in range(20)}
        for name in names:
            put(store, name, b"x")
        for shard in {name.path[:2] for name in names}:
            found = list(store.listed(shard))
            assert {one.name for one in found} == {name for name in names if name.path.startswith(shard)}
            assert all(-60 < one.age < 600 for one in found)
        assert everything(store) == names

    def test_objects_are_deleted_also_those_that_are_gone(self, store: Store) -> None:
        gone, kept = name_of(), name_of()
        put(store, gone, b"1")
        put(store, kept, b"2")
        store.delete([gone])
        store.delete([gone, name_of()])
        store.delete([])
        assert everything(store) == {kept}
        with pytest.raises(Absent):
            store.open(gone).read()

    def test_a_folder_that_is_not_there_is_no_error(self, store: Store) -> None:
        assert list(store.folders("executions")) == []
        store.delete_folder("executions/nothing")

    def test_values_are_stored_and_read(self, store: Store) -> None:
        payloads, value = (
            PayloadStore(store, 1_000, None),
            [{"n": number, "text": "x" * 100} for number in range(5_000)],
        )
        reference = _stored(payloads.result(msgspec.msgpack.encode(value), os.urandom(16), None, 1))
        assert msgspec.msgpack.decode(payloads.encoded(reference)) == value
        assert msgspec.msgpack.decode(payloads.encoded(reference.at(4_999))) == value[4_999]
        store.delete([reference.name])
        with pytest.raises(Gone, match="is not in the payload store"):
            payloads.encoded(reference)

    def test_what_no_row_names_is_collected(self, store: Store) -> None:
        alive, gone = os.urandom(16), os.urandom(16)
        kept, repeated = name_of(alive, attempt=2), name_of(alive, attempt=1)
        for name in (kept, repeated, name_of(gone)):
            put(store, name, b"x")

        def collected(grace: float) -> int:
            collector = Collector(store, grace, lambda asked: {*asked} & {gone}, lambda asked: dict.fromkeys(asked, 2))
            list(collector.find_unreferenced())
            return sum(collector.delete())

        assert collected(3_600.0) == 0
        assert collected(-60.0) == 2
        assert everything(store) == {kept}


def _stored(data: bytes) -> Reference:
    found = whole_reference(data)
    assert found is not None
    return found
