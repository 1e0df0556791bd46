"""Flow graphs: their versions, which runs are theirs, and the visits of these to their nodes."""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.execute("ALTER TABLE orchestrator.runs ADD COLUMN flow boolean NOT NULL DEFAULT false")
    op.execute("COMMENT ON COLUMN orchestrator.runs.flow IS 'of a flow graph: its planner ends it'")
    op.execute("CREATE INDEX runs_of_flows ON orchestrator.runs (id) WHERE flow")
    op.execute(
        """
        CREATE TABLE orchestrator.flows (
            name text NOT NULL,
            version integer NOT NULL,
            hash text NOT NULL,
            definition jsonb NOT NULL,
            published boolean NOT NULL DEFAULT true,
            created_at timestamptz NOT NULL DEFAULT now(),
            deleted_at timestamptz,
            PRIMARY KEY (name, version)
        )
        """
    )
    op.execute("COMMENT ON TABLE orchestrator.flows IS 'flow graphs, immutable under (name, version)'")
    op.execute("COMMENT ON COLUMN orchestrator.flows.version IS '0 says only that there is such a flow'")
    op.execute(
        """
        CREATE TABLE orchestrator.node_runs (
            run_id uuid NOT NULL,
            number integer NOT NULL,
            node text NOT NULL,
            kind text NOT NULL,
            status text NOT NULL,
            attempt integer NOT NULL,
            action text NOT NULL,
            error text,
            input bytea,
            output bytea,
            first_call integer NOT NULL,
            calls integer NOT NULL,
            started_at timestamptz NOT NULL,
            ended_at timestamptz NOT NULL,
            PRIMARY KEY (run_id, number)
        )
        """
    )
    op.execute("COMMENT ON TABLE orchestrator.node_runs IS 'append-only: visits of runs of flows to their nodes'")
    op.execute("COMMENT ON COLUMN orchestrator.node_runs.node IS 'its key, behind those of the nodes above it'")
    op.execute("COMMENT ON COLUMN orchestrator.node_runs.input IS 'null where its tasks have it'")
    op.execute(
        "COMMENT ON COLUMN orchestrator.node_runs.first_call IS 'the number from which the ids of its tasks derive'"
    )
    op.execute("COMMENT ON COLUMN orchestrator.node_runs.calls IS 'how many tasks it had'")


def downgrade() -> None:
    op.execute("DROP TABLE orchestrator.node_runs")
    op.execute("DROP TABLE orchestrator.flows")
    op.execute("DROP INDEX orchestrator.runs_of_flows")
    op.execute("ALTER TABLE orchestrator.runs DROP COLUMN flow")
