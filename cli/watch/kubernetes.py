"""Conditions, taints and labels of nodes, as Kubernetes' API lists them (``GET /api/v1/nodes``). The parser is pure.

The kubelet's own silence (``Ready`` is ``Unknown``) is left out: Unicron asks the node's agent itself. So is a cordon
(``unschedulable``): what runs there stays. ``kubectl drain`` ends the agent's pod, and the agent drains its node by
itself.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.watch.trouble import Severity, Trouble, key_of, label
from shared.errors import Forbidden, InvalidInput, Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the token and the certificates of its service account."""

PAGE_ITEMS = 500
TIMEOUT_S = 30.0

HEALTHY_IF_TRUE = ("Ready", "EtcdIsVoter")
"""Ends of the types of conditions that are good if they hold: Ready, KernelReady, AcceleratedHardwareReady, ..."""

TAINTS = (
    "node.kubernetes.io/out-of-service",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/",
)
"""Taints of a node that is to go away, by their keys or, with ``/`` at the end, by the beginning of them."""

SENTINEL = "dgxc.nvidia.com/nvsentinel-state"
"""The label by which NVSentinel says how far it is with a faulty node."""

MENDED = "remediation-succeeded"
"""The value of that label of a node that is well again."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What is heard beside what always is.

    Attributes:
        errors: types of conditions that are errors, and not warnings.
        ignored: types of conditions that mean nothing.
        taints: further keys of taints.
    """

    errors: Sequence[str] = ()
    ignored: Sequence[str] = ()
    taints: Sequence[str] = ()


def troubles(nodes: Sequence[Mapping[str, Any]], heard: Heard) -> list[Trouble]:
    """Return the troubles of some nodes, as the API lists them."""
    return [trouble for node in nodes for trouble in _of_node(node, heard)]


def _of_node(node: Mapping[str, Any], heard: Heard) -> Iterator[Trouble]:
    metadata = node.get("metadata", {})
    name = label(str(metadata.get("name", "")))
    for condition in node.get("status", {}).get("conditions") or ():
        kind = str(condition.get("type", ""))
        bad = "False" if kind.endswith(HEALTHY_IF_TRUE) else "True"
        if condition.get("status") == bad and kind not in heard.ignored:
            reason = f"{kind} is {bad}: {condition.get('message') or condition.get('reason') or ''}"
            severity: Severity = "error" if kind in heard.errors else "warning"
            yield Trouble(name, key_of("kubernetes", kind), severity, reason, condition)
    for taint in node.get("spec", {}).get("taints") or ():
        key = str(taint.get("key", ""))
        if any(key == one or (one.endswith("/") and key.startswith(one)) for one in (*TAINTS, *heard.taints)):
            yield Trouble(name, key_of("kubernetes", key), "warning", f"taint {key}:{taint.get('effect')}", taint)
    state = str((metadata.get("labels") or {}).get(SENTINEL, ""))
    if state and state != MENDED:
        yield Trouble(name, "kubernetes.nvsentinel", "warning", f"NVSentinel: {state}", {SENTINEL: state})


class Nodes:
    """The nodes that Kubernetes' API lists.

    Args:
        url: of the API; None: that of the cluster in which this pod runs.
        account: folder with ``token`` and ``ca.crt``, which are read anew each time: Kubernetes renews the token.
        heard: see ``Heard``.

    Raises:
        InvalidInput: no URL is given, and this is no pod.
    """

    def __init__(self, url: str | None, account: Path, heard: Heard) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if url is None and host is None:
            problem = "is needed outside of a pod: the address of Kubernetes' API"
            raise InvalidInput.of("--api", None, problem, f"--api {problem}")
        address = f"[{host}]" if host and ":" in host else host
        self._url, self._account, self._heard = url or f"https://{address}:{port}", account, heard

    def look(self) -> list[Trouble]:
        """List the nodes, and return their troubles.

        Raises:
            Unavailable: the API does not answer, or not readably.
            Forbidden: the service account may not list nodes.
        """
        try:
            return troubles(list(self._items()), self._heard)
        except (httpx.HTTPError, ValueError, OSError) as err:
            raise Unavailable(f"{self._url}: {err}") from err

    def _items(self) -> Iterator[Mapping[str, Any]]:
        token = (self._account / "token").read_text().strip()
        authority = self._account / "ca.crt"
        verify = ssl.create_default_context(cafile=str(authority)) if authority.exists() else True
        headers, going_on = {"Authorization": f"Bearer {token}"}, ""
        with httpx.Client(base_url=self._url, headers=headers, verify=verify, timeout=TIMEOUT_S) as http:
            while True:
                answer = http.get("/api/v1/nodes", params={"limit": PAGE_ITEMS, "continue": going_on})
                if answer.status_code in (401, 403):
                    raise Forbidden(f"{self._url}: the service account may not list nodes ({answer.status_code})")
                page = answer.raise_for_status().json()
                yield from page["items"]
                going_on = page.get("metadata", {}).get("continue") or ""
                if not going_on:
                    return
