"""Pods of built manifests under podman: commands, environment, volumes, rights, probes, preStop as a kubelet has them.

There is no Kubernetes: no scheduler, no Services but names, no NetworkPolicies, no controllers, no limits.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.condition import until_blocking
from tests.containers.compose import HEALTHY_S, LABEL
from tests.containers.podman import attempt, environment, inspected, podman

Record = dict[str, Any]

EXPANDED = re.compile(r"\$(?:(\$)|\(([A-Za-z_]\w*)\))")
"""What Kubernetes replaces in commands and values: ``$$`` by ``$``, and ``$(NAME)``."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with its variables, as Kubernetes has it; those that do not exist stay."""
    return EXPANDED.sub(lambda found: "$" if found[1] else variables.get(found[2], found[0]), text)


@dataclass(frozen=True)
class Cluster:
    """What pods are made of beside their manifests.

    ``project``: the label of all that is made; the network has this name too. ``folder``: for the files of Secrets and
    ConfigMaps. ``configs`` and ``secrets``: name -> key -> content. ``images``: of a manifest -> of podman.
    ``users``: component -> user, where a stand-in's image has another id than the real one.
    """

    project: str
    folder: Path
    images: Mapping[str, str]
    configs: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, str]]
    users: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> tuple[str, str]:
        """Arguments that label what podman makes."""
        return ("--label", f"{LABEL}={self.project}")


class Pod:
    """A pod with one container.

    Args:
        cluster: in which it runs.
        template: of the workload, with its claims' templates among the volumes.
        name: of the pod.
        node: on which it runs.
        aliases: names under which other pods reach it.
        publish: what podman publishes of it.
    """

    def __init__(
        self,
        cluster: Cluster,
        template: Record,
        name: str,
        node: str,
        *,
        aliases: Sequence[str] = (),
        publish: Sequence[str] = (),
    ) -> None:
        self.name = f"{cluster.project}-{name}"
        self._cluster, self._pod_name, self._node, self._aliases, self._publish = (
            *(cluster, name, node),
            *(aliases, publish),
        )
        self._spec: Record = template["spec"]
        self._component: str = template["metadata"]["labels"]["app.kubernetes.io/component"]
        (self._container,) = self._spec["containers"]
        self._volumes = {one["name"]: self._make_volume(one) for one in self._spec["volumes"]}

    def start(self) -> None:
        """Run the init containers to their ends, and start the container."""
        for one in self._spec.get("initContainers", []):
            podman("run", "--rm", "--network", "none", *self._arguments(one))
        aliases = [word for alias in self._aliases for word in ("--network-alias", alias)]
        ports = [word for port in self._publish for word in ("--publish", port)]
        # The first process of a pod whose containers share their processes reaps; podman's does it here.
        init = ["--init"] if self._spec.get("shareProcessNamespace") else []
        podman(
            *("run", "--detach", "--name", self.name, "--network", self._cluster.project, *aliases, *ports, *init),
            *self._arguments(self._container),
        )

    def wait_ready(self) -> None:
        """Wait until the startup probe and then the readiness probe succeed, with the liveness probe after them."""
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe := self._container.get(kind):
                try:
                    until_blocking(functools.partial(self.probed, probe), f"{kind} of {self.name}", limit_s=HEALTHY_S)
                except AssertionError as err:
                    logs = attempt("logs", "--tail", "40", self.name)
                    raise AssertionError(f"{err}; it printed: {logs.stdout}{logs.stderr}") from err

    def probed(self, probe: Record) -> bool:
        """Return whether a probe succeeds."""
        if "exec" in probe:
            return self.run(*probe["exec"]["command"]).returncode == 0
        request = probe["httpGet"]
        (port,) = (one["containerPort"] for one in self._container["ports"] if one["name"] == request["port"])
        networks = inspected("container", self.name)["NetworkSettings"]["Networks"]
        address = networks[self._cluster.project]["IPAddress"]
        try:
            answer = httpx.get(f"http://{address}:{port}{request['path']}", timeout=probe["timeoutSeconds"])
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    def run(self, *command: str, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        return attempt("exec", self.name, *command, limit_s=limit_s)

    def delete(self) -> tuple[int, float]:
        """End the pod as a kubelet does: preStop, SIGTERM, and SIGKILL at the end of the grace period.

        Returns:
            The container's exit status, and how many seconds that took.
        """
        grace_s: float = self._spec["terminationGracePeriodSeconds"]
        begin = time.monotonic()
        hook = self._container["lifecycle"]["preStop"]["exec"]["command"]
        # It ends with the container, so its own exit status says nothing.
        subprocess.run(
            ["podman", "exec", self.name, *hook], env=environment(), capture_output=True, timeout=grace_s, check=False
        )
        attempt("stop", "--time", str(max(2, round(grace_s - (time.monotonic() - begin)))), self.name, limit_s=grace_s)
        status: int = inspected("container", self.name)["State"]["ExitCode"]
        return status, time.monotonic() - begin

    def replace(self) -> None:
        """Start the next pod of a workload, in the place of one that was deleted."""
        podman("rm", self.name)
        self.start()

    # ---- podman's arguments

    def _arguments(self, container: Record) -> list[str | Path]:
        """Return the arguments of `podman run` behind those of name and network, with image and command."""
        variables = self._variables(container)
        rights, pod_rights = container["securityContext"], self._spec["securityContext"]
        user = self._cluster.users.get(self._component, f"{pod_rights['runAsUser']}:{pod_rights['runAsGroup']}")
        words: list[str | Path] = [*self._cluster.label, "--user", user, "--http-proxy=false", "--hostname", self._node]
        if "fsGroup" in pod_rights:
            words += ["--group-add", str(pod_rights["fsGroup"])]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        words += ["--read-only", "--read-only-tmpfs=false", "--security-opt", "no-new-privileges"]
        words += [f"--cap-drop={one}" for one in rights["capabilities"]["drop"]]
        words += [f"--cap-add={one}" for one in rights["capabilities"].get("add", [])]
        words += [f"--env={name}={value}" for name, value in variables.items()]
        words += [f"--volume={self._mounted(one, variables)}" for one in container.get("volumeMounts", [])]
        if command := container.get("command"):
            words += ["--entrypoint", json.dumps([expand(word, variables) for word in command])]
        return [*words, self._cluster.images[container["image"]], *container.get("args", [])]

    def _variables(self, container: Record) -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in container.get("env", []):
            found[entry["name"]] = self._value(entry, found)
        return found

    def _value(self, entry: Record, variables: Mapping[str, str]) -> str:
        if "value" in entry:
            return expand(entry["value"], variables)
        if reference := entry["valueFrom"].get("secretKeyRef"):
            return self._cluster.secrets[reference["name"]][reference["key"]]
        return {"spec.nodeName": self._node, "metadata.name": self._pod_name}[
            entry["valueFrom"]["fieldRef"]["fieldPath"]
        ]

    def _mounted(self, mount: Record, variables: Mapping[str, str]) -> str:
        source = self._volumes[mount["name"]]
        if "subPathExpr" in mount:
            source = f"{source}/{expand(mount['subPathExpr'], variables)}"
        options = ["nocopy"] if not source.startswith("/") else []
        options += ["ro"] if mount.get("readOnly") else []
        return f"{source}:{mount['mountPath']}" + (f":{','.join(options)}" if options else "")

    # ---- volumes

    def _make_volume(self, volume: Record) -> str:
        """Make a volume; return the name of podman's, or the folder."""
        if "emptyDir" in volume or "persistentVolumeClaim" in volume:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            name = f"{self._cluster.project}-{claim}" if claim else f"{self.name}-{volume['name']}"
            if attempt("volume", "exists", name).returncode != 0:
                podman("volume", "create", *self._cluster.label, name)
                place = Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", name).strip())
                os.chown(place, 0, self._spec["securityContext"].get("fsGroup", 0))
                place.chmod(0o2777 if "fsGroup" in self._spec["securityContext"] else 0o777)
            return name
        if "hostPath" in volume:
            return str(volume["hostPath"]["path"])
        folder = self._cluster.folder / self._pod_name / volume["name"]
        if "projected" in volume:
            mode = volume["projected"]["defaultMode"]
            for source in volume["projected"]["sources"]:
                self._fill(folder, source, mode)
        else:
            self._fill(folder, volume, (volume.get("secret") or volume["configMap"]).get("defaultMode", 0o644))
        return str(folder)

    def _fill(self, folder: Path, source: Record, mode: int) -> None:
        """Write the files of a Secret or a ConfigMap, for the pod's group."""
        secret = "secret" in source
        reference = source["secret"] if secret else source["configMap"]
        name = reference.get("secretName", reference.get("name"))
        content = (self._cluster.secrets if secret else self._cluster.configs).get(name)
        if content is None:
            assert reference.get("optional"), f"there is no {name}"
            return
        items = {one["key"]: one["path"] for one in reference.get("items", [])} or {key: key for key in content}
        for key, path in items.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content[key])
            os.chown(file, 0, self._spec["securityContext"].get("fsGroup", 0))
            file.chmod(mode)
