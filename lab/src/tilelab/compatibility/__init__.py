"""Support of the drop-ins, as rows of docs/compatibility.md."""
