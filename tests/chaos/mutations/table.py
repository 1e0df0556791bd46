"""All mutations."""

from tests.chaos.mutations.of_flows import FLOWS
from tests.chaos.mutations.of_runs import CAREFUL_TICKS, CODE, PLANS
from tests.chaos.mutations.of_tasks import TASKS, TERMS

MUTATIONS = (*TASKS, *TERMS, *CAREFUL_TICKS, *PLANS, *CODE, *FLOWS)
