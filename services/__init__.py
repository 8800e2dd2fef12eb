"""The services: detector, planner, transition, api. None imports another; what two of them need is in ``shared``."""
