"""Signatures of cache images: found in the registry, checked in a child process against the signers that policies name.

`verify.verify` is the door. `signing.sign` makes one; everything between is read as if an enemy had written it.
"""
