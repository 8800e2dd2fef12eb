"""Verbs that plan and simulate without a cluster, and show the plans of one."""
