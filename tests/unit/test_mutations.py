"""The mutations of `scripts/mutations` can still be made: the product is written as each of them expects it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.chaos.mutations.copies import REPOSITORY
from tests.chaos.mutations.mutation import Finder, Mutation, NotThere
from tests.chaos.mutations.table import MUTATIONS


def test_every_mutation_still_applies() -> None:
    for mutation in MUTATIONS:
        assert mutation.mutated(REPOSITORY) != (REPOSITORY / mutation.file).read_text(encoding="utf-8")
        compile(mutation.mutated(REPOSITORY), mutation.file, "exec")


def test_a_mutation_whose_text_is_gone_says_so() -> None:
    mutation = Mutation("gone", "", "orchestrator/scheduler/term.py", "no such text", "", ())
    with pytest.raises(NotThere, match="gone: expected its old text once in orchestrator/scheduler/term.py, found"):
        mutation.mutated(REPOSITORY)


def test_each_has_a_name_of_its_own_and_somebody_who_finds_it() -> None:
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert all(mutation.finders for mutation in MUTATIONS)


@pytest.mark.parametrize("finder", {finder.arguments: finder for one in MUTATIONS for finder in one.finders}.values())
def test_what_is_to_find_them_is_there(finder: Finder) -> None:
    re.compile(finder.says)
    for argument in finder.arguments:
        file, _, test = argument.partition("::")
        if file.startswith("tests/"):
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}" in text if test else text
