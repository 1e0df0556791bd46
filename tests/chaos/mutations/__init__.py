"""Mutations: a line of the product is broken on purpose, and somebody must find it.

A test that cannot fail proves nothing, and neither do a simulator and a chaos driver that find nothing.
`scripts/mutations` breaks the product in a copy of the repository, in one place after another, and runs what is to
notice.

- `mutation`: what a mutation is, and what finds it
- `of_tasks`, `of_runs`, `of_flows`: the table
- `copies`: a copy of the repository, in which one file is changed and changed back
"""
