"""HTTP: E2B-compatible and native routes, authentication, the error table. Decides nothing.

* app.py: puts it together; middleware.py: what happens around every route
* sandboxes.py, snapshots.py, system.py: the routes; unsupported.py: those refused by name
* wire.py, convert.py, listing.py, idempotency.py: objects, their meaning, lists, repeated creates
* errors.py: error → status; keys.py: the API key; metrics.py: what Prometheus is told
"""
