"""The mutations of `scripts/mutations` still match the product's code."""

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


def test_a_mutation_with_missing_text_raises_an_error() -> None:
    mutation = Mutation("gone", "", "orchestrator/scheduler/term.py", "no such text", "", ())
    with pytest.raises(NotThere, match="gone: expected its old text once in orchestrator/scheduler/term.py, found"):
        mutation.mutated(REPOSITORY)


def test_each_mutation_has_a_unique_name_and_a_test_that_finds_it() -> None:
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert all(mutation.finders for mutation in MUTATIONS)


@pytest.mark.parametrize("finder", {finder.arguments: finder for one in MUTATIONS for finder in one.finders}.values())
def test_the_tests_that_find_mutations_exist(finder: Finder) -> None:
    re.compile(finder.says)
    for argument in finder.arguments:
        file, _, test = argument.partition("::")
        if file.startswith("tests/"):
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}" in text if test else text
