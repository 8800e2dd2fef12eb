"""The environment variables of the rank processes of a node (``unicron.protocol.environment``)."""

from __future__ import annotations

from services.agent.files.rank_users import RankUsers
from services.agent.files.snapshot_folders import SnapshotFolders
from services.agent.files.task_files import TaskFiles
from services.agent.files.task_secrets import TaskSecrets
from services.agent.machine.address import NodeAddress, socket_environment
from services.agent.machine.hardware import NodeHardware
from services.agent.node.process import Process
from shared.settings.model import Settings
from shared.tasks.specification import TaskSpec
from unicron.protocol import environment

RECORDED_COLLECTIVES = "256"
"""Number of collectives that torch's flight recorder keeps: hundreds of times what a rank has under way. A report of
torch's own 2,000 takes 30 ms, in which the rank does nothing else; a report of 256 takes 3 ms (measured)."""


class RankEnvironment:
    """The variables that all ranks of the node have in common.

    Args:
        settings: ``node``, ``domain``, ``orphan_grace_s``, ``mtbf_node_s``.
        address: the node's.
        found: the node's workers and their devices.
        socket: name of the socket on which ranks connect, in Linux's abstract namespace.
        files: of the tasks.
        snapshots: of the tasks.
        users: of the tasks.
        secrets: of the tasks.
    """

    def __init__(
        self,
        settings: Settings,
        address: NodeAddress,
        found: NodeHardware,
        socket: str,
        files: TaskFiles,
        snapshots: SnapshotFolders,
        users: RankUsers,
        secrets: TaskSecrets,
    ) -> None:
        self._settings, self._address, self._found, self._socket = settings, address, found, socket
        self._files, self._snapshots, self._users, self._secrets = files, snapshots, users, secrets

    def of(self, process: Process, spec: TaskSpec) -> dict[str, str]:
        """Return the variables of a process that is to train a task. Blocks while it reads the task's secrets.

        Raises:
            Unavailable: a secret cannot be read.
        """
        return {
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": RECORDED_COLLECTIVES,
            **socket_environment(self._address.interface),
            **self._user(process.task),
            **spec.env,
            **self._secrets.read(spec.secrets),
            # The device's variables come behind the task's own: all its ranks are to have devices, each one of its own,
            # or none is.
            **self._found.environment(process.worker),
            environment.SOCKET: f"@{self._socket}",
            environment.TASK: process.task,
            environment.WORKER: process.worker,
            environment.RUN_DIR: str(self._files.folder(process.task)),
            environment.MEMORY: str(self._snapshots.of_task(process.task)),
            environment.NODE: self._settings.node,
            environment.DOMAIN: self._settings.domain,
            environment.HOST: self._address.store_ip,
            environment.ORPHAN_GRACE_S: str(self._settings.orphan_grace_s),
            environment.MTBF_NODE_S: str(self._settings.mtbf_node_s),
        }

    def _user(self, task: str) -> dict[str, str]:
        """Return what stands in for the entry in ``/etc/passwd`` that the user of a task does not have.

        Python and torch look a user's name up for the paths of their caches, and fail without one.
        """
        if not self._users.separate:
            return {}
        return {"USER": task, "LOGNAME": task, "HOME": str(self._files.folder(task))}
