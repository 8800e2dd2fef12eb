"""One run in simulated time: a trace happens, the policy answers, tasks train, the log is written."""
