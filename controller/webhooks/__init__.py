"""The admission webhooks: a server beside the controller's watches, in every replica, and the certificates it serves
with, kept by the one that leads. What is answered is decided in `planning.admission`.
"""
