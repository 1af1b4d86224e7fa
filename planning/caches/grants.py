"""What is said when berth may not read a pull secret: who can grant it, and how. For the conditions of caches."""

from __future__ import annotations


def missing_grant(namespace: str, secret: str) -> str:
    """The sentence with the commands that grant exactly that Secret to those two accounts that ask registries."""
    name = f"berth-pull-{secret}"[:253]
    return (
        f"berth may not read Secret {namespace}/{secret}; whoever owns the namespace grants it with: "
        f"kubectl -n {namespace} create role {name} --verb=get --resource=secrets --resource-name={secret} && "
        f"kubectl -n {namespace} create rolebinding {name} --role={name} "
        "--serviceaccount=berth-system:berth-worker --serviceaccount=berth-system:berth-node"
    )
