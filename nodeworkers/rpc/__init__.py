"""Python's messages of the interfaces in proto/, written by `generate.py`; the services are served by `sockets.py`."""
