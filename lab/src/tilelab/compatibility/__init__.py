"""What the drop-ins support, as rows of docs/compatibility.md."""
