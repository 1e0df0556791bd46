"""How costs grow with the amount of data: `scripts/bench --growth`. Costs are CPU time, counts and bytes, no wall time.

axes    one function per axis: fills a system to a size, and has it perform a fixed amount of work
stand   the system under test: scheduler, worker, and what they and the servers have used so far
fleet   a process that simulates many workers: real heartbeats and consumers, no task code
tasks   the functions and workflows
point   the process that measures one point
page    the chart, and the file with all figures
"""
