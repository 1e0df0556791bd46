"""Objects in a folder and behind fsspec: written whole, read in parts, and rejected if they were changed."""

from __future__ import annotations

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from orchestrator.domain.code.history import TaskCompleted
from orchestrator.domain.flow.commands import CallEnded
from orchestrator.domain.runs import RunChanges
from orchestrator.errors import ConfigurationError, PayloadError, Unavailable
from orchestrator.payloads.collector import Collector, collect_leftovers
from orchestrator.payloads.keeping import PayloadStore
from orchestrator.payloads.objects import CHUNK, Damaged, Gone, Output, Reading
from orchestrator.payloads.stores import MARK, Absent, Folder, Store, open_store
from orchestrator.references import (
    RESULT,
    ObjectName,
    Reference,
    is_reference,
    may_hold_references,
    owners_in,
    read_reference,
    stored_items,
    whole_reference,
)
from orchestrator.scheduler.flow.plans import _events
from orchestrator.sealing import Vault
from orchestrator.testing.payload_stores import PayloadStoreConformance
from orchestrator.workers.container import folder_of

TASK = bytes(range(16))
RUN = bytes(range(16, 32))
VAULT = Vault("store", {"first": b"1" * 32})


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path}", "space")


@pytest.fixture(params=[None, VAULT], ids=["plain", "sealed"])
def payloads(request: pytest.FixtureRequest, store: Store) -> PayloadStore:
    return PayloadStore(store, 1_000, request.param)


class TestFolder(PayloadStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path), "space")


class TestFsspec(PayloadStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"memory://{tmp_path}", "space")

    def test_an_object_appears_when_it_is_complete(self, store: Store) -> None:  # noqa: ARG002
        pytest.skip("fsspec's memory shows what is being written; buckets do not")


def reference_of(data: bytes) -> Reference:
    found = whole_reference(data)
    assert found is not None
    return found


def all_objects(store: Store) -> list[ObjectName]:
    return [found.name for number in range(256) for found in store.listed(f"{number:02x}")]


@pytest.mark.parametrize(
    "value",
    [b"x" * 3_000_000, ["item", {"n": 1}] * 20_000, {"key": "v" * 1_500_000}, "text" * 1_000, list(range(70_000))],
    ids=["bytes", "list", "mapping", "text", "numbers"],
)
def test_stored_values_round_trip(payloads: PayloadStore, value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    reference = payloads.result(data, TASK, RUN, 3)
    assert len(reference) < 250
    assert msgspec.msgpack.decode(payloads.encoded(reference_of(reference))) == value
    assert reference_of(reference).name[:4] == (RUN, TASK, 3, RESULT)


def test_objects_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    kept = PayloadStore(open_store(str(tmp_path), "orchestrator"), 10, None)
    kept.result(msgspec.msgpack.encode("x" * 100), bytes(16), None, 1)
    [written] = [one for one in tmp_path.rglob("*") if one.is_file() and one.name != MARK]
    modes = [one.stat().st_mode & 0o777 for one in (written, written.parent, written.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_small_values_are_not_stored(payloads: PayloadStore) -> None:
    assert payloads.result(b"x" * 1_000, TASK, None, 1) == b"x" * 1_000
    assert all_objects(payloads.store) == []


def test_an_item_of_a_list_is_read_alone(payloads: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"number": number, "text": "x" * 1_000} for number in range(5_000)]
    reference = reference_of(payloads.result(msgspec.msgpack.encode(items), TASK, None, 1))
    assert reference.count == 5_000
    read: list[int] = []
    chunk = Reading.chunk
    monkeypatch.setattr(Reading, "chunk", lambda self, number: (read.append(number), chunk(self, number))[1])
    for place in (0, 1, 777, 4_999):
        assert msgspec.msgpack.decode(payloads.encoded(reference.at(place))) == items[place]
    assert len(read) == 4
    with pytest.raises(Damaged):
        payloads.encoded(reference.at(5_000))


def test_a_stored_list_has_references_as_items(payloads: PayloadStore) -> None:
    reference = reference_of(payloads.result(msgspec.msgpack.encode(["abc"] * 1_000), TASK, None, 1))
    items = stored_items(reference.extension())
    assert items is not None
    assert len(items) == 1_000
    assert read_reference(bytes(items[7].data)) == reference.at(7)
    assert stored_items(items[7]) is None
    assert stored_items(["abc"]) is None


def test_bytes_are_written_and_read_as_files(payloads: PayloadStore) -> None:
    output = payloads.output(TASK, None, 1)
    with io.BufferedWriter(output) as file:
        for number in range(40):
            file.write(bytes([number]) * 100_000)
    reference = reference_of(output.finish())
    assert reference.size == 4_000_000
    with payloads.open(reference) as source:
        assert source.read(3) == b"\0\0\0"
        assert len(source.read()) == 4_000_000 - 3


def test_small_outputs_are_not_stored(payloads: PayloadStore) -> None:
    output = payloads.output(TASK, None, 1)
    output.write(b"abc")
    assert msgspec.msgpack.decode(output.finish()) == b"abc"
    assert all_objects(payloads.store) == []


def test_an_abandoned_output_leaves_no_object(payloads: PayloadStore) -> None:
    output = payloads.output(TASK, None, 1)
    output.write(b"x" * 2 * CHUNK)
    output.abandon()
    assert all_objects(payloads.store) == []
    with pytest.raises(ValueError, match="closed"):
        output.write(b"more")


def test_without_a_store_the_size_of_an_output_is_limited() -> None:
    output = Output(None, 10, lambda size: PayloadError(f"{size} bytes"))
    output.write(b"x" * 10)
    with pytest.raises(PayloadError, match="11 bytes"):
        output.write(b"x")


@pytest.mark.parametrize("place", [0, CHUNK + 5, -1])
def test_an_altered_object_is_rejected(tmp_path: Path, place: int) -> None:
    payloads = PayloadStore(Folder(tmp_path), 1_000, None)
    reference = reference_of(
        payloads.result(b"\xc6" + (2_000_000).to_bytes(4, "big") + b"x" * 2_000_000, TASK, None, 1)
    )
    path = tmp_path / reference.name.path
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=re.escape(reference.name.path)):
        payloads.encoded(reference)


def test_a_missing_object_is_named(payloads: PayloadStore) -> None:
    reference = reference_of(payloads.result(b"\xc5\xff\xff" + b"x" * 65_535, TASK, None, 1))
    payloads.store.delete([reference.name])
    payloads.store.delete([reference.name])
    payloads.result(b"\xc5\xff\xff" + b"x" * 65_535, TASK, None, 1)
    with pytest.raises(Gone, match="is not in the payload store"):
        payloads.encoded(reference)


def test_a_missing_folder_is_an_outage(tmp_path: Path) -> None:
    reference = reference_of(PayloadStore(Folder(tmp_path), 10, None).result(b"\xc4\x20" + b"x" * 32, TASK, None, 1))
    with pytest.raises(Unavailable, match="not mounted"):
        Reading(Folder(tmp_path / "away"), reference)
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="cannot be used"):
        Folder(tmp_path / "file").create(reference.name)
    with pytest.raises(Absent):
        Folder(tmp_path).open(reference.name._replace(attempt=2))


class NotesInMemory(set[str]):
    """Notes that a real store keeps in Redis."""

    has = set.__contains__
    note = set.add


def test_a_mount_point_without_its_mount_is_an_outage(tmp_path: Path) -> None:
    data, notes = b"\xc4\x20" + b"x" * 32, NotesInMemory()
    mounted, bare = tmp_path / "store", tmp_path / "away"
    payloads = PayloadStore(Folder(mounted, notes), 10, None)
    reference = reference_of(payloads.result(data, TASK, None, 1))
    mounted.rename(bare)
    mounted.mkdir()
    for one in (payloads, PayloadStore(Folder(mounted, notes), 10, None)):
        with pytest.raises(Unavailable, match="not mounted"):
            one.encoded(reference)
        with pytest.raises(Unavailable, match="not mounted"):
            one.result(data, TASK, None, 1)
    with pytest.raises(Unavailable, match="not mounted"):
        PayloadStore(Folder(mounted), 10, None).encoded(reference)
    assert list(mounted.iterdir()) == []
    mounted.rmdir()
    bare.rename(mounted)
    assert payloads.encoded(reference) == data
    assert PayloadStore(Folder(tmp_path / "another", notes), 10, None).result(data, TASK, None, 1)


def test_a_folder_of_an_earlier_release_is_marked_at_the_first_write(tmp_path: Path) -> None:
    data, notes = b"\xc4\x20" + b"x" * 32, NotesInMemory()
    reference = reference_of(PayloadStore(Folder(tmp_path), 10, None).result(data, TASK, None, 1))
    (tmp_path / MARK).unlink()
    payloads = PayloadStore(Folder(tmp_path, notes), 10, None)
    assert payloads.encoded(reference) == data
    payloads.store.delete([reference.name])
    with pytest.raises(Gone):
        payloads.encoded(reference)
    payloads.result(data, TASK, None, 1)
    assert (tmp_path / MARK).exists()
    assert notes == {str(tmp_path)}


def test_only_valid_names_are_parsed_as_objects(tmp_path: Path) -> None:
    name = ObjectName(RUN, TASK, 1, RESULT, TASK)
    assert ObjectName.parse(name.path) == name
    for path in ("../etc/passwd", name.path + "x", "00" + name.path[2:], name.path.replace(".1.", ".01."), ""):
        assert ObjectName.parse(path) is None


def test_a_forged_reference_is_rejected(payloads: PayloadStore) -> None:
    data = payloads.result(b"\xc5\xff\xff" + b"x" * 65_535, TASK, RUN, 1)
    assert is_reference(data)
    assert may_hold_references(b"\x91" + data)
    assert owners_in(b"\x92" + data + data) == {RUN}
    assert not may_hold_references(b"x" * 1_000)
    short = msgspec.structs.replace(reference_of(data), owner=b"../../etc")
    with pytest.raises(ValueError, match="damaged"):
        whole_reference(short.encoded())
    with pytest.raises(ValueError, match="cannot be read"):
        read_reference(b"\x93payload\x91\x01")


@pytest.mark.parametrize(
    "changed",
    [
        {"directory": 2**63},
        {"directory": 0},
        {"length": 2**40},
        {"form": "l", "count": 9, "item": 3},
        {"digest": b"0" * 32},
    ],
    ids=str,
)
def test_an_altered_reference_is_rejected(payloads: PayloadStore, changed: dict[str, Any]) -> None:
    reference = reference_of(payloads.result(b"\xc5\xff\xff" + b"x" * 65_535, TASK, RUN, 1))
    with pytest.raises(Damaged):
        payloads.encoded(msgspec.structs.replace(reference, **changed))


def test_a_reference_to_another_part_of_an_object_is_rejected(tmp_path: Path) -> None:
    payloads = PayloadStore(Folder(tmp_path), 10, None)
    reference = reference_of(payloads.result(b"\xc4\x20" + b"x" * 32, TASK, None, 1))
    other = hashlib.sha256(b"xxxx").digest()
    with pytest.raises(Damaged):
        payloads.encoded(msgspec.structs.replace(reference, directory=5, length=4, digest=other))


def test_the_collector_deletes_only_unreferenced_objects(payloads: PayloadStore) -> None:
    owners = [os.urandom(16) for _ in range(30)]
    alive, last = set(owners[:10]), {owners[0]: 2}
    kept = {reference_of(payloads.result(b"x" * 2_000, owner, None, 2)).name for owner in owners[:10]}
    for owner in owners[10:]:
        payloads.arguments(b"x" * 2_000, owner, None)
    payloads.result(b"x" * 2_000, owners[0], None, 1)  # left by a repeated attempt
    assert len(all_objects(payloads.store)) == 31

    def collected(grace: float) -> int:
        collector = Collector(
            payloads.store, grace, lambda asked: {*asked} - alive, lambda asked: {t: last.get(t, 2) for t in asked}
        )
        list(collector.find_unreferenced())
        alive.add(owners[10])  # a task created in the meantime
        return sum(collector.delete())

    assert collected(3_600.0) == 0
    assert collected(-1.0) == 20
    left = {name for name in all_objects(payloads.store) if name.owner != owners[10]}
    assert left == kept


def test_files_of_executions_are_collected_unless_their_task_is_open(store: Store, tmp_path: Path) -> None:
    root = str(tmp_path) if isinstance(store, Folder) else f"memory://{tmp_path}"
    ended, open_, gone = (UUID(bytes=os.urandom(16)) for _ in range(3))
    names = [f"task-{ended}-1", f"task-{open_}-3", f"task-{gone}-10", "somebody else's", f"task-{ended}-x"]
    for name in names:
        place = folder_of(f"{root}/space/executions/{name}")
        place.write("status.json", b"{}")
        place.write("output.json", b"1")

    def collected(grace: float) -> int:
        return sum(collect_leftovers(store, grace, lambda asked: {open_.bytes} & {*asked}))

    def left() -> list[str]:
        return sorted(name for name, _ in store.folders("executions"))

    assert collected(3_600.0) == 0
    assert left() == sorted(names)
    assert collected(-1.0) == 2
    assert left() == sorted(set(names) - {names[0], names[2]})
    store.delete_folder("executions/nothing")


def test_a_flow_receives_an_error_for_a_stored_result(payloads: PayloadStore) -> None:
    data = payloads.result(b"\xc5\xff\xff" + b"x" * 65_535, TASK, RUN, 1)
    changes = RunChanges()
    changes.facts.extend([TaskCompleted(TASK, data), TaskCompleted(TASK, b"\x01")])
    stored_one, small = _events([changes])
    assert isinstance(stored_one, CallEnded)
    assert "payload store" in (stored_one.error or "")
    assert small == CallEnded(TASK, 1)


@pytest.mark.parametrize("url", ["payloads", "./payloads"])
def test_a_relative_folder_is_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the absolute path of a folder"):
        open_store(url, "space")


def test_an_unknown_store_url_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="payload_store: nowhere://bucket"):
        open_store("nowhere://bucket", "space")
