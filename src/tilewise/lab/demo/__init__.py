"""The demo: one small GPT, trained with plain attention and with tilewise, and a report on both."""
