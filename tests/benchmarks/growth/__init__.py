"""How costs grow with what there is: `scripts/bench --growth`. Costs are CPU time, counts and bytes, not wall time.

axes    one function for each axis: puts a system into a state of some size, and has it do a fixed piece of work
stand   the system: scheduler, worker, and what both and the servers have used so far
fleet   a process that is many workers: real heartbeats and consumers, no bodies
tasks   the functions and workflows
point   the process that measures one point
page    the chart, and the file with all figures
"""
