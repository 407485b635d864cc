"""Client and supervision of blockd, the storage engine. No byte of a disk passes through here."""
