"""Sets are encoded in the same order in every process if the value is compared with a stored one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator import PayloadError
from orchestrator.sdk.values.payload import decode_call, encode_call
from orchestrator.sdk.values.sorting import sorted_sets

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import dataclasses, attrs, msgspec, pydantic
from collections import deque
from orchestrator.sdk.values.payload import encode_call

@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    tags: frozenset = frozenset("abcdef")

class Struct(msgspec.Struct, frozen=True, tag=True, rename="camel"):
    some_tags: frozenset = frozenset("abcdef")

class Model(pydantic.BaseModel):
    tags: set[str]

@attrs.define
class Attrs:
    tags: set

texts = set("ghijkl")
mixed = {"b", 1, None, (1, "x"), frozenset("abc"), frozenset("cde")}
values = [texts, mixed, {Frozen("a"), Frozen("b")}, Struct(), Model(tags=texts), Attrs(texts), deque([texts])]
print(encode_call("job", values, {"deep": {"er": [texts]}}, 10**6, is_compared=True).hex())
"""


DEFINITIONS = """
import msgspec
from orchestrator import Orchestrator, Workflow

texts = {"a", "b", "c", "d", "e"}
built = Workflow("built", params={"texts": {"type": "list", "default": texts}})
first = built.task("first", "job", input={"texts": texts})
built.task("second", "job", depends_on=[first], input={"texts": [first.value, {"texts": texts}]})
app = Orchestrator()

@app.schedule(every="1h", params={"texts": texts})
@app.task
def job(texts: set[str]) -> None: ...

declared = [declaration.definition() for declaration in app.schedules._declared.values()]
print(msgspec.json.encode([built.definition(), *declared]).decode())
"""


def output_of(program: str) -> str:
    """Return what a program prints in three processes, which order sets differently."""
    outputs = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        outputs.add(subprocess.check_output(command, env=environment, cwd=REPOSITORY, text=True, timeout=120))
    (output,) = outputs
    return output


def test_a_definition_with_sets_is_the_same_version_in_every_process() -> None:
    assert output_of(DEFINITIONS).count('["a","b","c","d","e"]') == 4


def test_a_compared_call_is_encoded_alike_in_every_process() -> None:
    arguments, keywords = decode_call(bytes.fromhex(output_of(PROGRAM)))
    assert arguments[0] == keywords["deep"]["er"][0] == ["g", "h", "i", "j", "k", "l"]
    assert arguments[3] == {"type": "Struct", "someTags": ["a", "b", "c", "d", "e", "f"]}
    assert arguments[6] == [arguments[0]]


class Plain(msgspec.Struct):
    items: list[int]


@pytest.mark.parametrize("value", [1, "a", [1, [2]], {"b": 1, "a": [2]}, (1, 2), Plain([3, 1]), object(), range(3)])
def test_a_value_without_sets_is_left_as_it_is(value: Any) -> None:
    assert sorted_sets(value) is value


def test_what_cannot_be_encoded_is_still_named() -> None:
    with pytest.raises(PayloadError, match="Argument 2 of task 'job' cannot be serialised: builtins.object"):
        encode_call("job", [{1}, {object()}], {}, 1_000, is_compared=True)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="Argument 1 of task 'job'"):
        encode_call("job", [endless], {}, 1_000, is_compared=True)
