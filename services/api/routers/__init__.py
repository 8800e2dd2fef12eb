"""The interface's endpoints, one router for each resource; all of them run on the event loop (``gateway.py``)."""
