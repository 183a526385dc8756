"""What a run writes while it trains, and the folder that holds it."""
