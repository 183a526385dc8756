"""The records that a run writes while it trains, and the folder that holds them."""
