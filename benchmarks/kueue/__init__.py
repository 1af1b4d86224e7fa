"""Kueue's performance baseline, by its own harness and by berth: the same workloads, classes and queues, one after the
other on this machine. For whoever wants to know what it costs that every decision is durable.

Execution is pretended on both sides: a runner ends what was admitted once its time is over. No pods, kubelet, scheduler
or controller-manager of Kubernetes are there; etcd and kube-apiserver have the same flags on both sides.
"""
