"""Records of captured computers (templates, snapshots, pauses, forks) and the layers they hold."""
