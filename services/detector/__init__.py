"""Error detection: the node agent (``agent``) and the cluster monitor (``monitor``)."""
