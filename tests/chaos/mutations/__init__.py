"""Mutations: a line of the product is broken on purpose, and a test must fail.

A test that cannot fail proves nothing; the same is true of the simulator and the chaos driver. `scripts/mutations`
breaks the product in a copy of the repository, one place at a time, and runs the commands that must notice.

- `mutation`: a mutation, and the commands that find it
- `of_tasks`, `of_runs`, `of_flows`: the table of mutations
- `copies`: a copy of the repository, in which one file at a time is changed and restored
"""
