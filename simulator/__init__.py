"""The trace-driven simulator: what a history of failures costs a cluster under each policy.

It feeds the planner's core, the cost accounting and the event types of the running system. A run's output is an event
log of the normal kind, so ``unicron replay --verify`` and the cost report work on it.

    trace.py      what happens to nodes and tasks, and when
    workload.py   a cluster, its tasks, and a trace
    generators.py, trace_files.py, log_traces.py    where traces come from
    paper_tasks.py, paper_workloads.py              the tasks and workloads of the Unicron paper, by name
    cluster_files.py, workload_inputs.py            what a user gives
    figures.py, published.py                        the paper's figures and numbers beside ours
    policies/     how each system detects, decides and recovers
    engine.py     a run: the planner's fold and answers, in simulated time (agenda.py)
    nodes.py      what a trace does to nodes, and when it is found
    execution.py  how plans are carried out (phases.py), and how tasks train meanwhile (training.py, rates.py)
    recorder.py   the log of a run
    accounting.py its costs, by the cost report's own code
    outcome.py    what a run achieved, and what it cost
"""
