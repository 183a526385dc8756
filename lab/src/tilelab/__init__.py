"""The lab: what attention costs, measured, and which training choices pay, with error bars."""
