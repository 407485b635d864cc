"""The aenv command."""
