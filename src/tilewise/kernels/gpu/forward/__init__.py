"""The forward pass: of many queries, and of few with their keys split among programs."""
