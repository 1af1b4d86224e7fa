"""What a node's workflow asks for: that caches are checked anew on a node that is another than it was, and that nobody
waits for a node that is gone.
"""

from __future__ import annotations

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.cache_signatures import LOOK_AT_NODE, NodeLook, NodeLooked
from kube.client import KubeClient
from kube.errors import NotFound
from kube.resources import NODES

_CACHES = 'BerthKind = "KernelCache" AND ExecutionStatus = "Running"'
_ON_NODE = 'BerthKind = "NodeKernelCache" AND BerthNode = "{node}" AND ExecutionStatus = "Running"'


class NodeLooks:
    def __init__(self, kube: KubeClient, temporal: Client) -> None:
        self._kube = kube
        self._temporal = temporal

    @activity.defn(name=LOOK_AT_NODE)
    async def look(self, look: NodeLook) -> NodeLooked:
        """Raises KubeError or RPCError where nobody answers; it is repeated."""
        try:
            await self._kube.get(NODES, look.node)
        except NotFound:
            told = await self._each(_ON_NODE.format(node=look.node), "dismiss")
            return NodeLooked("end", f"the node is gone; {told} orders to it are no longer waited for")
        if not look.changed:
            return NodeLooked("wait", "as it was")
        told = await self._each(_CACHES, "recheck", look.node)
        return NodeLooked("wait", f"its hardware or its store changed: {told} caches are to be checked anew there")

    async def _each(self, query: str, signal: str, *values: object) -> int:
        told = 0
        async for execution in self._temporal.list_workflows(query, page_size=1000):
            try:
                await self._temporal.get_workflow_handle(execution.id).signal(signal, args=values)
                told += 1
            except RPCError as refused:
                if refused.status != RPCStatusCode.NOT_FOUND:
                    raise
        return told
