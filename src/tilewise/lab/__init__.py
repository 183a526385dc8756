"""The lab: what attention buys, measured. It uses the public API only."""
