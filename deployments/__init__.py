"""Sluice on Ray Serve: text in and out, HTTP, pools of engine replicas. Engines speak tokens only."""
