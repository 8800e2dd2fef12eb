"""The node agent and the services of the control plane. None imports another; what several need is in ``shared``."""
