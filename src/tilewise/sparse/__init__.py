"""Block-sparse attention: masks that know of each tile whether it is empty or full."""
