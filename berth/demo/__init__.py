"""`berth demo`: a real trace, replayed through the API server on simulated nodes, for people who see berth first.

trace (the extract) → cut (a smaller cluster, shorter runs) → manifests → live (what watches tell) → view, report.
"""
