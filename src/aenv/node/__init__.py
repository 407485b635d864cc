"""The sandboxes of one node: manager, admission, time to live, durable store, reconcilers."""
